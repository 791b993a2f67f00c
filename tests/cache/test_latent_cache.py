"""The cache without transformers: called directly, also where transformers is not installed."""

import copy
import subprocess
import sys
import textwrap

import pytest
import torch

import mla_compile
from mla_compile import PagedLatentCache, PagePool


def tokens(count, batch=2, dtype=torch.float32):
    return torch.randn(batch, 1, count, 4, dtype=dtype), torch.randn(batch, 1, count, 2, dtype=dtype)


def test_layers_append_to_the_same_places():
    cache = PagedLatentCache(PagePool(3, 4, 2, pages=16, page_size=2))
    kept = [[] for _ in range(3)]
    for count in (5, 1, 1, 3):
        for layer in range(3):
            latent, rope = tokens(count)
            kept[layer].append((latent, rope))
            found = cache.update(latent, rope, layer)
            for side in (0, 1):
                assert torch.equal(found[side], torch.cat([step[side] for step in kept[layer]], dim=2))
    assert cache.get_seq_length() == 10
    assert cache.get_mask_sizes(3, 0) == (13, 0)
    assert cache.pool.available == 16 - 2 * 5


def test_an_empty_cache_is_forked_like_any_other():
    cache = PagedLatentCache(PagePool(1, 4, 2, pages=32, page_size=4))
    latent, rope = tokens(6)
    for other in (cache.fork(), cache.fork(torch.tensor([1, 0, 0]))):
        assert torch.equal(other.update(latent, rope, 0)[0], latent)
    assert cache.get_seq_length() == 0


def test_crop_fork_select_and_reset():
    cache = PagedLatentCache(PagePool(1, 4, 2, pages=32, page_size=4))
    latent, rope = tokens(6)
    cache.update(latent, rope, 0)
    other = cache.fork([1])
    with pytest.raises(TypeError, match="integer"):
        cache.crop(-1.5)
    cache.crop(-1)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 2, 1, 0]))
    cache.batch_select_indices(torch.tensor([True, False, False, True]))
    more = tokens(1)
    found, _ = cache.update(*more, 0)
    assert torch.equal(found, torch.cat([latent[[1, 0], :, :5], more[0]], dim=2))
    one = tokens(1, batch=1)
    found, _ = other.update(*one, 0)
    assert torch.equal(found, torch.cat([latent[1:], one[0]], dim=2))
    cache.reset()
    other.reset()
    assert cache.pool.available == 32
    assert cache.get_seq_length() == 0


def test_an_empty_cache_has_no_sequences_to_choose():
    cache = PagedLatentCache(PagePool(1, 4, 2, pages=32, page_size=4))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices([0])
    cache.reorder_cache(torch.tensor([0]))
    assert cache.batch_size == -1
    cache.update(*tokens(3), 0)
    assert cache.batch_size == 2


@pytest.mark.parametrize("fixed", [False, True])
def test_sequences_are_chosen_by_numbers_or_a_mask(fixed):
    pool = PagePool(1, 4, 2, pages=32, page_size=4)
    cache = PagedLatentCache(pool, 2, batch=3) if fixed else PagedLatentCache(pool)
    latent, rope = tokens(3, batch=3)
    cache.update(latent, rope, 0)
    for rows in (torch.tensor([2, 0]), torch.tensor([True, False, True])):
        other = cache.fork(rows)
        assert (other.batch_size, other.batch) == (2, 2 if fixed else None)
        assert torch.equal(other.table.read(0), torch.cat([latent, rope], dim=-1)[rows, 0])
    cache.batch_select_indices([2, 0])
    assert torch.equal(cache.table.read(0), torch.cat([latent, rope], dim=-1)[[2, 0], 0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (tokens(1, dtype=torch.float64), "expected tokens of the pool's dtype torch.float32, found torch.float64"),
        (tokens(1, batch=3), "expected tokens of 2 sequences, found 3"),
        (tokens(1)[::-1], "expected latents and rope keys of widths 4 and 2, found 2 and 4"),
        ([t.expand(-1, 3, -1, -1) for t in tokens(1)], "expected latents that all heads share"),
    ],
    ids=["dtype", "batch", "widths", "heads"],
)
def test_tokens_that_do_not_fit_change_nothing(wrong, message):
    cache = PagedLatentCache(PagePool(1, 4, 2, pages=16, page_size=2))
    latent, rope = tokens(5)
    cache.update(latent, rope, 0)
    with pytest.raises(mla_compile.CacheMismatchError, match=message):
        cache.update(*wrong, 0)
    assert torch.equal(cache.table.read(0), torch.cat([latent, rope], dim=-1)[:, 0])
    assert cache.pool.available == 10


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("width", [0, 2])
def test_compiled_steps_after_a_fork_are_one_graph_each(width):
    """Also rope keys of width 0, as layers without rope have, beside others."""
    pool = PagePool(1, 4, 2, pages=12, page_size=4)
    step = torch.compile(lambda cache, *new: cache.update(*new, 0), backend="mla", fullgraph=True)
    cache = PagedLatentCache(pool)
    beginning = tokens(6)
    cache.update(beginning[0], beginning[1][..., :width], 0)
    fork = cache.fork()
    written = {cache: [beginning], fork: [beginning]}
    for continued in (fork, cache, fork):
        latent, rope = tokens(1)
        written[continued].append((latent, rope))
        found = step(continued, latent, rope[..., :width])
        for part, whole in enumerate(found):
            expected = torch.cat([each[part] for each in written[continued]], dim=2)
            assert torch.equal(whole, expected[..., :width] if part else expected)


@pytest.mark.usefixtures("without_codegen")
def test_a_cache_that_is_dropped_gives_its_pages_back_compiled_too():
    pool = PagePool(1, 4, 2, pages=4, page_size=2)
    step = torch.compile(lambda cache, *new: cache.update(*new, 0)[0].sum(), backend="mla", fullgraph=True)
    for _ in range(4):
        cache = PagedLatentCache(pool)
        for _ in range(2):
            latent, rope = tokens(2)
            step(cache, latent, rope)
        assert torch.equal(cache.table.read(0)[:, -2:], torch.cat([latent, rope], dim=-1)[:, 0])
        assert pool.available == 0
        del cache  # what has been compiled may be in a circle with it
        assert pool.available == 4


def test_a_copy_of_a_cache_has_a_pool_of_its_own():
    cache = PagedLatentCache(PagePool(1, 4, 2, pages=8, page_size=2))
    cache.update(*tokens(3), 0)
    expected, other = cache.table.read(0), copy.deepcopy(cache)
    pool = cache.pool
    del cache
    assert torch.equal(other.table.read(0), expected)
    assert (pool.available, other.pool.available) == (8, 4)


def test_import_does_not_import_transformers_and_use_does_not_need_it():
    script = """
        import sys, torch, mla_compile
        dir(mla_compile)
        assert "transformers" not in sys.modules
        sys.modules["transformers"] = None
        cache = mla_compile.PagedLatentCache(mla_compile.PagePool(1, 4, 2, pages=4, page_size=2))
        latent, rope = cache.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 2), 0)
        assert latent.shape == (1, 1, 3, 4) and rope.shape == (1, 1, 3, 2)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
