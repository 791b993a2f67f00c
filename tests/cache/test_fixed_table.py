"""Sequences that have all their pages from the start do what a `BlockTable` does, with their length on the device."""

import pytest
import torch

import mla_compile
from mla_compile.cache import BlockTable, FP8PagePool, PagePool, stack
from mla_compile.cache.fixed_table import FixedTable

PAGES, PAGE_SIZE, WIDTH = 64, 2, 6


def pool(kind=PagePool, pages=PAGES):
    return kind(2, 4, 2, pages, PAGE_SIZE)


def append(table, tokens):
    table.extend(tokens.shape[1])
    for layer in range(2):
        table.write(layer, tokens + layer)


@pytest.mark.parametrize("kind", [PagePool, FP8PagePool])
def test_it_holds_what_a_growing_table_holds(kind):
    pages = pool(kind)
    fixed, grown = FixedTable(pages, 2, 5), BlockTable(pages, 2)
    address = fixed.pages.data_ptr(), fixed.tokens.data_ptr()

    def assert_same(a, b):
        for layer in range(2):
            assert torch.equal(a.read(layer), b.read(layer))

    tables = [(fixed, grown)]
    for count in (3, 1, 2):
        for pair in tables:
            tokens = torch.randn(pair[1].batch, count, WIDTH)
            for table in pair:
                append(table, tokens)
        tables.append((fixed.fork(torch.tensor([1])), grown.fork(torch.tensor([1]))))
        for pair in tables:
            assert_same(*pair)
    for rows in ([1, 1], [1, 0], [0, 0]):
        fixed, grown = fixed.select(torch.tensor(rows)), grown.select(torch.tensor(rows))
        length = grown.length - 1
        for table in (fixed, grown):
            table.crop(length)
        tokens = torch.randn(2, 2, WIDTH)
        for table in (fixed, grown):
            append(table, tokens)
        for pair in [(fixed, grown), *tables[1:]]:
            assert_same(*pair)
    assert (fixed.pages.data_ptr(), fixed.tokens.data_ptr()) == address
    for pair in [(fixed, grown), *tables[1:]]:
        for table in pair:
            table.free()
    assert pages.available == PAGES


@pytest.mark.parametrize("rows", [[2, 0], [1], [-1, 0]])
def test_sequences_are_dropped_without_a_free_page(rows):
    pages = pool(pages=3 * 4)
    table, rows = FixedTable(pages, 3, 4), torch.tensor(rows)
    append(table, torch.randn(3, 3, WIDTH))
    expected = table.read(1)[rows]
    table = table.select(rows)
    assert pages.available == 4 * (3 - len(rows))
    append(table, torch.randn(len(rows), 1, WIDTH))
    assert torch.equal(table.read(1)[:, :3], expected)
    table.free()
    assert pages.available == 3 * 4


def test_another_number_of_sequences_is_another_table():
    pages = pool()
    table = FixedTable(pages, 2, 3)
    append(table, torch.randn(2, 3, WIDTH))
    before = table.read(1)
    wider = table.select(torch.tensor([0, 1, 1]))
    assert torch.equal(wider.read(1), before[[0, 1, 1]])
    wider.free()
    assert pages.available == PAGES


def test_pages_are_taken_at_once():
    pages = pool(pages=7)
    table = FixedTable(pages, 2, 3)
    assert pages.available == 1
    with pytest.raises(mla_compile.OutOfPagesError, match="expected 2 free pages, found 1 of 7"):
        FixedTable(pages, 1, 2)
    assert pages.available == 1
    del table
    assert pages.available == 7


def test_more_tokens_than_there_is_room_for_are_an_error():
    table = FixedTable(pool(), 1, 2)
    append(table, torch.randn(1, 3, WIDTH))
    with pytest.raises(mla_compile.CacheMismatchError, match="expected room for 2 more tokens, found room for 1"):
        table.extend(2)
    assert int(table.tokens) == 3
    with pytest.raises(mla_compile.CacheMismatchError, match="expected a length from 0 to 3, found 4"):
        table.crop(4)
    with pytest.raises(mla_compile.CacheMismatchError, match="expected tokens of 1 sequences, found 2"):
        table.write(0, torch.randn(2, 1, WIDTH))


@pytest.mark.parametrize(
    ("count", "message"), [(4, "at most the 3 tokens"), (-1, "a number of tokens to add, found -1")]
)
def test_tokens_that_cannot_be_change_nothing(count, message):
    table = FixedTable(pool(), 1, 2)
    append(table, torch.ones(1, 3, WIDTH))
    with pytest.raises(mla_compile.CacheMismatchError, match=f"expected {message}"):
        table.write(0, torch.zeros(1, count, WIDTH)) if count > 0 else table.extend(count)
    assert table.length == 3
    assert bool((table.read(0) == 1.0).all())


def test_a_crop_takes_no_page_that_another_sequence_of_its_own_can_keep():
    pages = pool(pages=4)
    table = FixedTable(pages, 2, 2)
    tokens = torch.randn(2, 4, WIDTH)
    append(table, tokens)
    table = table.select(torch.tensor([1, 1]))
    assert pages.available == 2
    table.crop(1)
    assert pages.available == 0
    more = torch.randn(2, 3, WIDTH)
    append(table, more)
    assert torch.equal(table.read(0), torch.cat([tokens[[1, 1], :1], more], dim=1))


def test_what_an_earlier_holder_left_is_not_read():
    """Attention multiplies what is behind the last token by 0, which NaN survives."""
    pages = pool(pages=4)
    append(FixedTable(pages, 1, 4), torch.full((1, 8, WIDTH), float("nan")))
    table = FixedTable(pages, 1, 2)
    append(table, torch.ones(1, 1, WIDTH))
    for own in (table, table.fork()):
        assert all(bool(keys.isfinite().all()) for keys in own.keys(0))


def test_a_stack_has_its_length_and_pages():
    pages = pool()
    fixed, grown = FixedTable(pages, 2, 3), BlockTable(pages, 1)
    for table, count in ((fixed, 3), (grown, 8)):
        append(table, torch.randn(table.batch, count, WIDTH))
    block_table, lengths = stack([fixed, grown])
    assert fixed.length == 3
    assert lengths.tolist() == [3, 3, 8]
    tokens = pages.layers[1][block_table].flatten(1, 2)
    assert torch.equal(tokens[:2, :3], fixed.read(1))
    assert torch.equal(tokens[2:, :8], grown.read(1))


def test_it_has_no_tokens_when_freed_and_the_length_that_was_read_stays():
    table = FixedTable(pool(), 1, 2)
    append(table, torch.randn(1, 3, WIDTH))
    before = table.tokens
    table.free()
    assert (table.length, int(before)) == (0, 3)
