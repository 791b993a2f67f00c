"""Caches in int8 pages: the ops read the numbers and scales, or the graph dequantises where they cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.caches.test_fp8_near_misses import check_gathered
from tests.passes.caches.test_fp8_pages import (
    INT8,
    PAGE_SIZE,
    Read,
    a_number_for_all,
    attend,
    check_read,
    embedding,
    graph,
    in_pages,
    inputs,
    one_a_group,
    one_a_token,
    one_for_all,
    position_by_position,
    reads_coded,
    scale_first,
    slots,
    the_first_keys,
    times,
)
from tests.passes.caches.test_pages import OPS, SPARSE, L, R, positions
from tests.passes.checks import check_right
from tests.passes.graphs import capture, rewrite, run


def cast_by_torch(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """int8 times float32 without a cast: torch's type promotion makes it float32."""
    latent = pages[table] * scales[..., :1][table]
    return latent.flatten(1, 2).to(rope.dtype), rope[table].flatten(1, 2)


def a_number_cast_by_torch(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return (pages[table] / 64).flatten(1, 2).to(rope.dtype), rope[table].flatten(1, 2)


def whole_rows(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Latents and rope keys in one pool, with one scale per token."""
    rows = torch.cat([pages, (32 * rope).round().to(INT8)], dim=-1)
    tokens = rows[table].to(rope.dtype) * scales[..., :1][table]
    latent, k_rope = tokens.flatten(1, 2).split([L, R], dim=-1)
    return latent, k_rope


def written_first(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    place = torch.tensor([1, 8]), torch.tensor([3, 0])
    pages, scales = pages.index_put(place, pages[0, :2]), scales.index_put(place, scales[0, :2])
    return in_pages(pages, scales, rope, table)


READS: dict[str, Read] = {
    read.__name__.replace("_", " "): read
    for read in (
        in_pages,
        one_a_token,
        cast_by_torch,
        a_number_cast_by_torch,
        whole_rows,
        written_first,
        the_first_keys,
        position_by_position,
        slots,
        embedding,
        scale_first,
        one_for_all,
        one_a_group,
        a_number_for_all,
    )
}


@pytest.mark.diagonal
@pytest.mark.parametrize("path", OPS)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_pages_in_int8_are_read_as_they_are(read: Read, path: str) -> None:
    tensors = inputs(queries=1 if path == "absorbed" else 9, coded=INT8)
    check_read(read, tensors, path, INT8)


def of_a_zero_point(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent = (pages[table].to(rope.dtype) - 3) * scales[..., :1][table].to(rope.dtype)
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def of_a_zero_point_a_token(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    own = scales[table].to(rope.dtype)
    latent = pages[table].to(rope.dtype) * own[..., :1] + own[..., 1:]
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def a_scale_a_column_of_each_token(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Column c is multiplied by scale c modulo the number of scales."""
    numbers = pages[table].to(rope.dtype).unflatten(-1, (-1, scales.shape[2]))
    return (numbers * scales[table][..., None, :]).flatten(-2).flatten(1, 2), rope[table].flatten(1, 2)


def beyond_int8(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Products are computed in int8, where they wrap around."""
    return times(pages[table] * 3, scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def beyond_int8_after(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent = (pages[table].to(rope.dtype) * scales[table][..., :1]).to(INT8)
    return latent.flatten(1, 2).to(rope.dtype), rope[table].flatten(1, 2)


def without_a_sign(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return in_pages(pages.view(torch.uint8), scales, rope, table)


def in_four_bits(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Each byte holds two numbers, of which only the lower one is read."""
    return times(pages[table] & 15, scales[table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def rope_without_scale(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent, _ = one_a_token(pages, scales, rope, table)
    return latent, (32 * rope).round().to(INT8)[table].flatten(1, 2).to(rope.dtype)


def rope_in_fp8(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rope keys have the same scale, but are in FP8."""
    own = scales[..., :1][table]
    k_rope = rope.to(torch.float8_e4m3fn)[table].to(rope.dtype) * own
    return (pages[table].to(rope.dtype) * own).flatten(1, 2), k_rope.flatten(1, 2)


def rows_of_others(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    page, row = table[:, positions() // PAGE_SIZE], positions() % PAGE_SIZE
    return times(pages[page, row], scales[page, (row + 1) % PAGE_SIZE], rope.dtype), rope[page, row]


NEAR_MISSES = (
    of_a_zero_point,
    of_a_zero_point_a_token,
    a_scale_a_column_of_each_token,
    beyond_int8,
    beyond_int8_after,
    without_a_sign,
    in_four_bits,
    rope_without_scale,
    rope_in_fp8,
    rows_of_others,
)


@pytest.mark.diagonal
@pytest.mark.parametrize("path", OPS)
@pytest.mark.parametrize("read", NEAR_MISSES)
def test_what_the_op_does_not_take_is_dequantised_first(read: Read, path: str) -> None:
    tensors = inputs(torch.float64, coded=INT8)
    check_gathered(graph(read, tensors), tensors, path)


BUFFERS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "one scale a token": (lambda numbers, scales: numbers.double() * scales[..., :1], True),
    "a zero point": (lambda numbers, scales: (numbers.double() - 1) * scales[..., :1], False),
}


@pytest.mark.parametrize(("latents", "in_int8"), BUFFERS.values(), ids=BUFFERS)
def test_keys_that_are_named_are_read_in_int8_from_a_buffer(
    latents: Callable[[Tensor, Tensor], Tensor], in_int8: bool
) -> None:
    """A buffer is read like one page per sequence, without a table. No op takes a zero point."""
    q, weight, pages, scales, rope, _ = inputs(torch.float64, coded=INT8)
    tensors = [q, weight, pages[:2], scales[:2], rope[:2], torch.randn(2, 1, PAGE_SIZE)]

    def function(q: Tensor, weight: Tensor, numbers: Tensor, scales: Tensor, rope: Tensor, scores: Tensor) -> Tensor:
        named = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, scores.topk(2).indices, True)
        return attend(q, latents(numbers, scales), rope, weight, named[:, None])

    module = capture(function, *tensors)
    eager = run(module, *tensors)
    (outcome,) = rewrite(module, "sparse")
    (call,) = (node.args for node in module.graph.nodes if node.target is SPARSE)
    assert (call[2].meta["val"].dtype == INT8) == in_int8
    assert outcome.reason.endswith("reads keys in INT8") == in_int8
    check_right(eager, run(module, *tensors))


def test_a_weight_in_int8_is_not_taken_for_a_cache() -> None:
    """An up-projection in int8 with one scale per row, beside a cache in int8."""
    q, weight, pages, scales, rope, table = inputs(torch.float64, coded=INT8)
    small, by = (100 * weight).round().to(INT8), torch.rand(len(weight), 1)

    def function(q: Tensor, small: Tensor, by: Tensor, *cache: Tensor) -> Tensor:
        return attend(q, *in_pages(*cache), small.to(q.dtype) * by / 100)

    tensors = [q, small, by, pages, scales, rope, table]
    module = capture(function, *tensors)
    eager = run(module, *tensors)
    (outcome,) = rewrite(module)
    assert outcome.path == "absorbed"
    assert reads_coded(module, INT8)
    check_right(eager, run(module, *tensors))
