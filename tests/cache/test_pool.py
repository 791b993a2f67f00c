"""Pages and the tables that hold them: every misuse says what was expected, and changes nothing."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_compile
from mla_compile.cache import BlockTable, PagePool, stack
from mla_compile.cache.shared_table import SharedTable
from mla_compile.cache.shares import Shares


def pool(pages=4, **more):
    return PagePool(1, 4, 2, pages, page_size=2, **more)


def filled(pool, length, value, batch=1):
    table = BlockTable(pool, batch)
    table.extend(length)
    table.write(0, torch.full((batch, length, 6), value, dtype=pool.dtype))
    return table


def test_out_of_pages_changes_nothing():
    pages = pool()
    a, b = filled(pages, 5, 1.0), filled(pages, 2, 2.0)
    with pytest.raises(mla_compile.OutOfPagesError, match="expected 1 free pages, found 0 of 4") as error:
        b.extend(1)
    assert isinstance(error.value, MemoryError)
    assert b.length == 2
    assert bool((a.read(0) == 1.0).all())
    assert bool((b.read(0) == 2.0).all())
    a.free()
    b.extend(4)
    assert b.length == 6


def test_a_pool_gives_no_more_pages_than_are_free_without_a_table_too():
    pages = pool()
    new, place = torch.tensor([True] * 5), torch.arange(5)
    with pytest.raises(mla_compile.OutOfPagesError, match="expected 5 free pages, found 4 of 4"):
        pages.take_where(new, place, torch.zeros(5, dtype=torch.int64), 5)
    assert pages.available == 4
    assert not pages.references.any()


def test_a_copy_of_a_table_is_a_fork():
    pages = pool()
    a = filled(pages, 3, 1.0)
    b = copy.copy(a)
    del b
    assert pages.available == 2  # a keeps its own
    filled(pages, 4, 2.0)
    assert bool((a.read(0) == 1.0).all())


def test_a_fork_that_cannot_be_copied_stays_as_it_is():
    pages = pool(pages=2)
    a = filled(pages, 3, 1.0)
    b = a.fork()
    with pytest.raises(mla_compile.OutOfPagesError):
        b.extend(1)
    assert torch.equal(a.read(0), b.read(0))
    a.free()
    b.extend(1)  # alone with its pages: nothing to copy
    assert (b.length, pages.available) == (4, 0)


def test_the_last_page_is_copied_once_and_full_ones_never():
    pages = pool(pages=8)
    a = filled(pages, 3, 1.0)
    b = a.fork()
    assert pages.available == 6
    for table, value in ((b, 2.0), (a, 3.0)):
        table.extend(1)
        table.write(0, torch.full((1, 1, 6), value))
    assert pages.available == 5
    assert torch.equal(a.pages[:, 0], b.pages[:, 0])
    assert a.read(0)[0, :, 0].tolist() == [1.0, 1.0, 1.0, 3.0]
    assert b.read(0)[0, :, 0].tolist() == [1.0, 1.0, 1.0, 2.0]


def test_a_full_page_that_a_crop_opens_is_copied_before_it_is_written():
    pages = pool(pages=8)
    a = filled(pages, 4, 1.0)
    b = a.fork()
    b.crop(3)
    b.extend(1)
    b.write(0, torch.full((1, 1, 6), 2.0))
    assert bool((a.read(0) == 1.0).all())
    assert b.read(0)[0, :, 0].tolist() == [1.0, 1.0, 1.0, 2.0]


def test_what_was_freed_cannot_be_used():
    pages = pool()
    table = filled(pages, 2, 1.0)
    page = table.pages[:, :1].clone()
    table.free()
    uses = (table.free, lambda: table.extend(1), lambda: table.read(0), table.fork, lambda: stack([table]))
    for use in uses:
        with pytest.raises(mla_compile.FreedError, match="freed"):
            use()
    for use in (pages.share, pages.release, lambda p: pages.write(0, p, torch.zeros_like(p), torch.ones(1, 1, 6))):
        with pytest.raises(mla_compile.FreedError, match="which is free"):
            use(page)
    assert bool((pages.references == 0).all())
    assert pages.available == 4


def test_pages_that_are_not_there():
    pages = pool()
    filled(pages, 2, 1.0)
    for page in (-1, 4):
        outside = torch.tensor([[page]])
        for use in (
            pages.share,
            pages.release,
            lambda p: pages.read(0, p, torch.zeros_like(p)),
            lambda p: pages.write(0, p, torch.zeros_like(p), torch.ones(1, 1, 6)),
        ):
            with pytest.raises(mla_compile.PageIndexError, match=f"expected pages from 0 to 3, found {page}"):
                use(outside)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(1, 1, 6, dtype=torch.float64), "expected tokens of the pool's dtype torch.float32"),
        (torch.zeros(1, 1, 5), "expected tokens 6 wide, found 5"),
        (torch.zeros(2, 1, 6), "expected tokens of 1 sequences, found 2"),
        (torch.zeros(1, 3, 6), "expected at most the 2 tokens that there is room for, found 3"),
    ],
    ids=["dtype", "width", "batch", "too many"],
)
def test_tokens_that_do_not_fit(tokens, message):
    table = filled(pool(), 2, 1.0)
    with pytest.raises(mla_compile.CacheMismatchError, match=message):
        table.write(0, tokens)
    assert bool((table.read(0) == 1.0).all())


def test_tokens_that_a_fork_shares_are_not_written_again():
    pages = pool()
    a = filled(pages, 3, 1.0)
    b = a.fork()
    with pytest.raises(
        mla_compile.CacheMismatchError, match="expected tokens behind the 3 that a fork shares, found 1"
    ):
        a.write(0, torch.zeros(1, 1, 6))
    for table, value in ((a, 2.0), (b, 3.0)):
        table.extend(1)
        table.write(0, torch.full((1, 1, 6), value))
    a.crop(2)
    a.extend(1)
    a.write(0, torch.full((1, 1, 6), 4.0))
    assert [t.read(0)[0, :, 0].tolist() for t in (a, b)] == [[1.0, 1.0, 4.0], [1.0, 1.0, 1.0, 3.0]]


def test_a_negative_number_of_tokens_changes_nothing():
    pages = pool()
    table = filled(pages, 3, 1.0)
    fork = table.fork()
    with pytest.raises(mla_compile.CacheMismatchError, match="expected a number of tokens to add, found -1"):
        table.extend(-1)
    assert (table.length, fork.length, pages.available) == (3, 3, 2)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ("4", "expected pages to be a whole number, found '4'"),
        (1.5, "expected pages to be a whole number, found 1.5"),
        (True, "expected pages to be a whole number, found True"),
        (-1, "expected pages to be at least 1, found -1"),
        (10**13, "expected pages that fit into the .* GiB of cpu, found 10000000000000 of at least 96 bytes"),
    ],
)
def test_numbers_of_pages_that_cannot_be(pages, message):
    with pytest.raises(mla_compile.CacheMismatchError, match=message):
        PagePool(2, 4, 2, pages=pages, page_size=8)


def test_sizes_that_cannot_be():
    with pytest.raises(mla_compile.CacheMismatchError, match="expected page_size to be at least 1, found 0"):
        PagePool(1, 4, 2, pages=4, page_size=0)
    with pytest.raises(mla_compile.CacheMismatchError, match="expected at most 1 pages per sequence, found 2"):
        BlockTable(pool(), 1, max_pages=1).extend(3)
    table = filled(pool(), 2, 1.0)
    with pytest.raises(mla_compile.CacheMismatchError, match="expected a length from 0 to 2, found 3"):
        table.crop(3)
    with pytest.raises(mla_compile.CacheMismatchError, match="expected tables over one pool"):
        stack([table, filled(pool(), 2, 1.0)])
    split = SharedTable(table.pool, 1, None, Shares(ranks=2, rank=0, group="", interleave=1, page_size=2, spare=3))
    with pytest.raises(mla_compile.CacheMismatchError, match="expected tables whose pages hold all of their 4 tokens"):
        stack([table, split])


def test_a_stack_of_unequal_lengths():
    pages = pool(pages=8, dtype=torch.bfloat16)
    tables = [filled(pages, length, float(length)) for length in (5, 1, 3)]
    block_table, seq_lens = stack(tables)
    assert seq_lens.tolist() == [5, 1, 3]
    tokens = pages.layers[0][block_table].flatten(1, 2)
    for row, length in enumerate((5, 1, 3)):
        assert bool((tokens[row, :length] == length).all())


def test_tables_that_are_dropped_give_their_pages_back():
    pages = pool(pages=8)
    table = filled(pages, 5, 1.0)
    other = table.fork()
    with FakeTensorMode():  # at any moment: nothing is computed before the pool is asked
        del table
    assert pages.available == 5
    assert bool((other.read(0) == 1.0).all())
    again = filled(pages, 10, 2.0)  # takes all that are left
    assert bool((other.read(0) == 1.0).all())
    again.free()
    del again, other
    assert pages.available == 8
    assert not pages.references.any()
