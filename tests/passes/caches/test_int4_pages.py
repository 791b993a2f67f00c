"""Caches in pages of two numbers a byte: the ops read the bytes and scales, or the graph takes them apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_compile.int4 import PACKED, packed, unpacked
from tests.errors import assert_as_close_as_eager
from tests.passes.caches.test_fp8_near_misses import check_gathered
from tests.passes.caches.test_fp8_pages import (
    PAGE_SIZE,
    PAGES,
    Read,
    attend,
    check_read,
    graph,
    inputs,
    times,
)
from tests.passes.caches.test_pages import OPS, SPARSE, L, positions
from tests.passes.graphs import capture, rewrite, run


def cached(dtype: torch.dtype = torch.float32, queries: int = 1) -> list[Tensor]:
    """As `inputs`, with bytes of two numbers from -8 to 7 each."""
    q, weight, _, scales, rope, table = inputs(dtype, queries)
    numbers = torch.randint(-8, 8, (PAGES, PAGE_SIZE, L), dtype=torch.int8)
    return [q, weight, packed(numbers), scales / 8, rope, table]


def in_pages(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return times(unpacked(pages[table]), scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def laid_out_first(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent, own = unpacked(pages[table].flatten(1, 2)), scales[table].flatten(1, 2)
    return times(latent, own, rope.dtype), rope[table].flatten(1, 2)


def position_by_position(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    page, row = table[:, positions() // PAGE_SIZE], positions() % PAGE_SIZE
    return times(unpacked(pages[page, row]), scales[page, row], rope.dtype), rope[page, row]


def signs_in_floats(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    codes = pages[table]
    numbers = torch.stack([codes & 15, torch.bitwise_right_shift(codes, 4)], dim=-1).flatten(-2).to(rope.dtype) - 8
    return times(numbers, scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def side_by_side_by_cat(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    codes = pages[table].unsqueeze(-1)
    numbers = torch.cat([codes & 15, codes >> 4], dim=-1).view(*codes.shape[:-2], L).to(torch.int32) + -8
    return times(numbers, scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def signs_by_a_view(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers from 0 to 15 are the same bits in int8."""
    codes = pages[table]
    numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).view(torch.int8) - 8
    return times(numbers, scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def one_scale(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return times(unpacked(pages[table]), scales[0, 0, :1], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def written_first(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    place = torch.tensor([1, 8]), torch.tensor([3, 0])
    return in_pages(pages.index_put(place, pages[0, :2]), scales, rope, table)


READS: dict[str, Read] = {
    read.__name__.replace("_", " "): read
    for read in (
        in_pages,
        laid_out_first,
        position_by_position,
        signs_in_floats,
        side_by_side_by_cat,
        signs_by_a_view,
        one_scale,
        written_first,
    )
}


@pytest.mark.diagonal
@pytest.mark.parametrize("path", OPS)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_bytes_are_read_as_they_are(read: Read, path: str) -> None:
    tensors = cached(queries=1 if path == "absorbed" else 9)
    check_read(read, tensors, path, PACKED)


def test_named_keys_are_read_as_bytes() -> None:
    tensors = [*cached(), torch.randn(2, 1, 3 * PAGE_SIZE)]

    def function(q: Tensor, weight: Tensor, *cache: Tensor) -> Tensor:
        *cache, scores = cache
        named = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, scores.topk(2).indices, True)
        return attend(q, *laid_out_first(*cache), weight, named[:, None])

    module = capture(function, *tensors)
    eager = run(module, *tensors)
    (outcome,) = rewrite(module, "sparse")
    (call,) = (node.args for node in module.graph.nodes if node.target is SPARSE)
    assert call[2].meta["val"].dtype == PACKED
    assert outcome.reason.endswith("reads the pages")
    wide = [t.double() if t.dtype == torch.float32 else t for t in tensors[:-1]]
    assert_as_close_as_eager(run(module, *tensors), eager, function(*wide, tensors[-1]))


def apart(codes: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.stack([low, high], dim=-1).flatten(-2).to(torch.int8) - 8


def upper_half_first(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    codes = pages[table]
    latent = times(apart(codes, codes >> 4, codes & 15), scales[table], rope.dtype)
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def one_half_twice(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    codes = pages[table]
    latent = times(apart(codes, codes & 15, codes & 15), scales[table], rope.dtype)
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def halves_of_other_pages(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    codes, other = pages[table], pages.flip(0)[table]
    latent = times(apart(codes, codes & 15, other >> 4), scales[table], rope.dtype)
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def halves_by_another_table(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    codes, other = pages[table], pages[table.flip(1)]
    latent = times(apart(codes, codes & 15, other >> 4), scales[table], rope.dtype)
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def lower_halves_first(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of all lower halves, then those of all upper ones."""
    codes = pages[table]
    numbers = torch.cat([codes & 15, codes >> 4], dim=-1).to(torch.int8) - 8
    return times(numbers, scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def three_bits(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    codes = pages[table]
    latent = times(apart(codes, codes & 7, codes >> 4), scales[table], rope.dtype)
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def shifted_by_three(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    codes = pages[table]
    latent = times(apart(codes, codes & 15, codes >> 3), scales[table], rope.dtype)
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def without_signs(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent = times(unpacked(pages[table]) + 8, scales[table], rope.dtype)
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def of_no_sign(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    codes = pages[table]
    numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return times(numbers, scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def of_no_sign_by_a_view(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    codes = pages[table]
    numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).view(torch.int8)
    return times(numbers, scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def half_of_each_byte_by_a_view(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.cat([pages, pages], dim=-1)[table]
    return times((codes & 15).view(torch.int8), scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def less_seven(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent = times(unpacked(pages[table]) + 1, scales[table], rope.dtype)
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def signs_that_wrap(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Less 8 in bytes, which have no sign: 0 becomes 248."""
    codes = pages[table]
    numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2) - 8
    return times(numbers, scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def twice_the_sign(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    codes = pages[table]
    numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).to(torch.int8)
    latent = times(torch.sub(numbers, 8, alpha=2), scales[table], rope.dtype)
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def the_sign_the_other_way(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    codes = pages[table]
    numbers = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).to(torch.int8)
    return times(8 - numbers, scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def bytes_with_signs(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Shifting a number with a sign keeps the sign."""
    codes = pages.view(torch.int8)[table]
    latent = times(apart(codes, codes & 15, codes >> 4), scales[table], rope.dtype)
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def some_columns(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of a part of each row."""
    rows = torch.cat([pages, pages], dim=-1)
    latent = times(unpacked(rows[table][..., 1 : 1 + L // 2]), scales[table], rope.dtype)
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def every_other_column(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    numbers = unpacked(torch.cat([pages, pages], dim=-1)[table])[..., ::2]
    return times(numbers, scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def rope_from_bytes(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    own = scales[..., :1][table]
    k_rope = unpacked(pages[..., : rope.shape[-1] // 2][table]).to(rope.dtype) * own
    return (unpacked(pages[table]).to(rope.dtype) * own).flatten(1, 2), k_rope.flatten(1, 2)


NEAR_MISSES = (
    upper_half_first,
    one_half_twice,
    halves_of_other_pages,
    halves_by_another_table,
    lower_halves_first,
    three_bits,
    shifted_by_three,
    without_signs,
    of_no_sign,
    of_no_sign_by_a_view,
    half_of_each_byte_by_a_view,
    less_seven,
    signs_that_wrap,
    twice_the_sign,
    the_sign_the_other_way,
    bytes_with_signs,
    some_columns,
    every_other_column,
    rope_from_bytes,
)


@pytest.mark.diagonal
@pytest.mark.parametrize("path", OPS)
@pytest.mark.parametrize("read", NEAR_MISSES)
def test_what_the_op_does_not_take_is_taken_apart_first(read: Read, path: str) -> None:
    tensors = cached(torch.float64)
    check_gathered(graph(read, tensors), tensors, path)
