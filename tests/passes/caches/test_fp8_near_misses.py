"""Reads that look like a cache in FP8 pages, but that the op cannot take: the graph dequantises, and is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx

from tests.passes.caches.test_fp8_pages import FP8, PAGE_SIZE, B, G, Read, graph, in_pages, inputs, one_for_all, times
from tests.passes.caches.test_pages import OPS, L, N, P, V, positions
from tests.passes.checks import check_right
from tests.passes.graphs import capture, rewrite, run


def another_table(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return times(pages[table], scales[table.flip(1)], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def other_entries(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent, own = pages[table[:, :2]].flatten(1, 2), scales[table[:, 1:]].flatten(1, 2)
    return times(latent, own, rope.dtype), rope[table[:, :2]].flatten(1, 2)


def other_rows(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    page, row = table[:, positions() // PAGE_SIZE], positions() % PAGE_SIZE
    return times(pages[page, row], scales[page, (row + 1) % PAGE_SIZE], rope.dtype), rope[page, row]


def rows_that_are_turned(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return times(pages[table], scales[table].flip(2), rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def one_a_row(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return times(pages[table], scales[0], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def one_a_page(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return times(pages[table], scales[:, :1][table], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def one_a_sequence(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return times(pages[table], scales[:B, :1, None, :], rope.dtype).flatten(1, 2), rope[table].flatten(1, 2)


def one_a_key(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    own = scales.flatten(0, 1)[: 3 * PAGE_SIZE]
    return times(pages[table].flatten(1, 2), own, rope.dtype), rope[table].flatten(1, 2)


def unequal_groups(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    own = scales[table].flatten(1, 2)
    own = torch.cat([own[..., :1].expand(-1, -1, 4), own[..., 1:].expand(-1, -1, L - 4)], dim=-1)
    return pages[table].flatten(1, 2).to(rope.dtype) * own, rope[table].flatten(1, 2)


def groups_side_by_side(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Column c belongs to group c modulo the number of groups."""
    numbers = pages[table].to(rope.dtype).unflatten(-1, (-1, G))
    return (numbers * scales[table][..., None, :]).flatten(-2).flatten(1, 2), rope[table].flatten(1, 2)


def scaled_twice(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent = pages[table].to(rope.dtype) * scales[..., :1][table] * scales[..., 1:][table]
    return latent.flatten(1, 2), rope[table].flatten(1, 2)


def quantised_again(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent, k_rope = in_pages(pages, scales, rope, table)
    return latent.to(torch.float8_e5m2).to(rope.dtype), k_rope


def numbers_times_numbers(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return (pages[table].to(rope.dtype) * pages[table].to(rope.dtype)).flatten(1, 2), rope[table].flatten(1, 2)


def of_another_rope(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Latents and rope keys in one pool, but with a scale for each of the two."""
    tokens = torch.cat([pages, rope.to(FP8)], dim=-1)[table].to(rope.dtype).flatten(1, 2)
    return tokens[..., :L] * scales[0, 0, :1], tokens[..., L:] * scales[0, 0, 1:]


def rope_without_scale(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent, _ = one_for_all(pages, scales, rope, table)
    return latent, rope.to(FP8)[table].flatten(1, 2).to(rope.dtype)


def other_numbers(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.cat([pages, rope.to(FP8)], dim=-1)[table].flatten(1, 2).to(rope.dtype)
    return tokens[..., :L] * 2.0, tokens[..., L:] * 4.0


def a_number_and_one_a_token(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent, _ = in_pages(pages, scales, rope, table)
    return latent, 2.0 * times(rope.to(FP8)[table], scales[table], rope.dtype).flatten(1, 2)


def groups_of_rope_too(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent, _ = in_pages(pages, scales, rope, table)
    return latent, times(rope.to(FP8)[table], scales[table], rope.dtype).flatten(1, 2)


def bytes_as_numbers(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return in_pages(pages.view(torch.uint8), scales / 64, rope, table)


NEAR_MISSES = (
    another_table,
    other_entries,
    other_rows,
    rows_that_are_turned,
    one_a_row,
    one_a_page,
    one_a_sequence,
    one_a_key,
    unequal_groups,
    groups_side_by_side,
    scaled_twice,
    quantised_again,
    numbers_times_numbers,
    of_another_rope,
    rope_without_scale,
    other_numbers,
    a_number_and_one_a_token,
    groups_of_rope_too,
    bytes_as_numbers,
)


@pytest.mark.diagonal
@pytest.mark.parametrize("path", OPS)
@pytest.mark.parametrize("read", NEAR_MISSES)
def test_what_the_op_does_not_take_is_dequantised_first(read: Read, path: str) -> None:
    tensors = inputs(torch.float64)
    check_gathered(graph(read, tensors), tensors, path)


def check_gathered(module: fx.GraphModule, tensors: Sequence[Tensor], path: str) -> None:
    """Assert that the path is taken without its op over pages, and that the result is right."""
    before = run(module, *tensors)
    (outcome,) = rewrite(module, path)
    assert outcome.path == path
    assert OPS[path] not in [node.target for node in module.graph.nodes]
    check_right(before, run(module, *tensors))


OTHERS = {
    "numbers in e5m2": lambda pages, scales: (pages.float().to(torch.float8_e5m2), scales),
    "numbers in int16": lambda pages, scales: ((30 * pages.float()).to(torch.int16), scales),
    "scales of a token in bfloat16": lambda pages, scales: (pages, scales.bfloat16()),
    "scales of a token in float64": lambda pages, scales: (pages, scales.double()),
}


@pytest.mark.parametrize("path", OPS)
@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
def test_other_dtypes_are_dequantised_first(others: Callable[..., tuple[Tensor, Tensor]], path: str) -> None:
    q, weight, pages, scales, *rest = inputs(torch.float64)
    tensors = [q, weight, *others(pages, scales), *rest]
    check_gathered(graph(in_pages, tensors), tensors, path)


def between_keys_and_values(q: Tensor, weight: Tensor, *cache: Tensor) -> Tensor:
    """Only the keys are scaled."""
    pages, _, rope, table = cache
    latent, k_rope = in_pages(*cache)
    plain = pages[table].to(rope.dtype).flatten(1, 2)
    k_nope = (latent @ weight.T).unflatten(2, (N, P + V))[..., :P].transpose(1, 2)
    v = (plain @ weight.T).unflatten(2, (N, P + V))[..., P:].transpose(1, 2)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
    return torch.ops.mla.sealed_attention(q, k, v, None, 0.0, False, None, False)


def after_the_product(q: Tensor, weight: Tensor, *cache: Tensor) -> Tensor:
    """Scales multiply the up-projected keys and values, after a function that is not linear."""
    pages, scales, rope, table = cache
    own = scales[..., :1][table].flatten(1, 2)
    expanded = (pages[table].to(rope.dtype).flatten(1, 2) @ weight.T).relu() * own
    k_nope, v = expanded.unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
    k = torch.cat([k_nope, rope[table].flatten(1, 2)[:, None].expand(-1, N, -1, -1)], dim=-1)
    return torch.ops.mla.sealed_attention(q, k, v, None, 0.0, False, None, False)


def test_a_scale_of_the_keys_alone_makes_two_latents() -> None:
    tensors = inputs()
    module = capture(between_keys_and_values, *tensors)
    eager = run(module, *tensors)
    (outcome,) = rewrite(module)
    assert outcome.path == "absorbed"
    assert outcome.shapes["Lk"] == outcome.shapes["L"]
    torch.testing.assert_close(run(module, *tensors), eager)


def test_a_scale_after_the_product_leaves_all_as_it_is() -> None:
    tensors = inputs()
    module = capture(after_the_product, *tensors)
    eager = run(module, *tensors)
    (outcome,) = rewrite(module)
    assert outcome.path == "unchanged"
    torch.testing.assert_close(run(module, *tensors), eager, rtol=0, atol=0)
