"""Whether there are pages for more tokens is checked in compiled code too, which stays compiled."""

import pytest
import torch

import mla_compile
from mla_compile import PagedLatentCache
from mla_compile.cache import BlockTable, PagePool


@pytest.fixture
def append(without_codegen):
    """A compiled function that makes room for tokens of a table."""

    @torch.compile(backend="mla", fullgraph=True, dynamic=True)
    def extend(table, count):
        table.extend(count)
        return table.pages.clone()

    return extend


@pytest.mark.parametrize(
    ("pages", "most", "error", "words"),
    [
        pytest.param(
            8,
            2,
            mla_compile.CacheMismatchError,
            "expected at most 2 pages per sequence, found 3 for 6",
            marks=pytest.mark.slow,
        ),
        (5, 4, mla_compile.OutOfPagesError, "expected 2 free pages, found 1 of 5"),
    ],
)
def test_an_error_of_compiled_code_changes_nothing(append, pages, most, error, words):
    table = BlockTable(PagePool(1, 4, 0, pages=pages, page_size=2), batch=2, max_pages=most)
    append(table, 3)
    before = table.pages.clone(), table.pool.references.clone()
    with pytest.raises(error, match=words):
        append(table, 3)
    assert (table.length, table.pool.available) == (3, pages - 4)
    assert torch.equal(table.pages, before[0])
    assert torch.equal(table.pool.references, before[1])
    compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    append(table, 1)
    assert (table.length, table.pool.available) == (4, pages - 4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - compilations <= 1
    append(table, 0)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.usefixtures("without_codegen")
def test_where_all_pages_are_taken_at_once_an_error_changes_nothing():
    """A cache that has all its pages from the start takes them again in the first step after `reset`."""

    @torch.compile(backend="mla", fullgraph=True)
    def step(cache, latent, k_rope):
        return cache.update(latent, k_rope, 0)[0]

    cache = PagedLatentCache(PagePool(1, 4, 2, pages=8, page_size=2), max_pages=2, batch=2)
    latent, k_rope = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 2)
    cache.reset()
    others = cache.pool.take(6)
    with pytest.raises(mla_compile.OutOfPagesError, match="expected 4 free pages, found 2 of 8"):
        step(cache, latent, k_rope)
    assert cache.table is None
    assert cache.pool.available == 2
    cache.pool.release(others)
    assert torch.equal(step(cache, latent, k_rope)[:, :, :3], latent)
    assert cache.pool.available == 4
    assert cache.table.pages.unique().tolist() == [4, 5, 6, 7]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]
