"""A cache in FP8 without pages: the sparse op reads the keys that a top-k names in FP8, or dequantised if it must."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.caches.test_fp8_pages import FP8, B, G, attend, times
from tests.passes.caches.test_pages import SPARSE, L, N, P, R, V
from tests.passes.checks import check_right
from tests.passes.graphs import capture, rewrite, run

T, NEW, QUERIES, TOPK = 12, 3, 2, 5

Read = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Makes `latent` `[B, T, L]` and `k_rope` `[B, T, R]` of numbers in FP8, scales `[B, T, G]` and rope keys."""


def inputs() -> list[Tensor]:
    q, weight = torch.randn(B, N, QUERIES, P + R).double(), torch.randn(N * (P + V), L).double() / L**0.5
    numbers, scales = torch.randn(B, T, L).to(FP8), 2.0 ** torch.randint(-3, 3, (B, T, G))
    return [q, weight, torch.randn(B, QUERIES, T), numbers, scales, torch.randn(B, T, R).double()]


def step(read: Read) -> Callable[..., Tensor]:
    def function(q: Tensor, weight: Tensor, scores: Tensor, *cache: Tensor) -> Tensor:
        named = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, scores.topk(TOPK).indices, True)
        return attend(q, *read(*cache), weight, named[:, None])

    return function


def a_buffer(numbers: Tensor, scales: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    return times(numbers, scales, rope.dtype), rope


def that_grows(numbers: Tensor, scales: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    numbers, scales = (torch.cat([t[:, :-NEW], t[:, :NEW]], dim=1) for t in (numbers, scales))
    return times(numbers, scales, rope.dtype), rope


def that_is_written(numbers: Tensor, scales: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    numbers, scales = numbers.clone(), scales.clone()
    numbers[:, torch.tensor([4])], scales[:, torch.tensor([4])] = numbers[:, :1], scales[:, :1]
    return times(numbers, scales, rope.dtype), rope


def one_scale(numbers: Tensor, scales: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    return numbers.to(rope.dtype) * scales[0, 0, 0].bfloat16() / 2, rope


def no_scale(numbers: Tensor, scales: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    return numbers.to(rope.dtype), rope


def rope_in_fp8(numbers: Tensor, scales: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.cat([numbers, rope.to(FP8)], dim=-1).to(rope.dtype) * scales[..., :1]
    return tokens[..., :L], tokens[..., L:]


def one_a_sequence(numbers: Tensor, scales: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    return numbers.to(rope.dtype) * scales[:, :1, :1], rope


def rewritten(read: Read) -> tuple[tuple, str]:
    """The arguments of the sparse op after the passes, and the report's reason. Asserts that the result is right."""
    tensors = inputs()
    module = capture(step(read), *tensors)
    before = run(module, *tensors)
    (outcome,) = rewrite(module, "sparse")
    check_right(before, run(module, *tensors))
    (call,) = (node.args for node in module.graph.nodes if node.target is SPARSE)
    return call, outcome.reason


@pytest.mark.parametrize(
    "read", [a_buffer, that_grows, that_is_written, one_scale, no_scale, rope_in_fp8, one_a_sequence]
)
def test_named_keys_are_read_in_fp8(read: Read) -> None:
    call, reason = rewritten(read)
    assert reason.endswith("reads keys in FP8")
    assert call[2].meta["val"].dtype == FP8


def rope_of_another_scale(numbers: Tensor, scales: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.cat([numbers, rope.to(FP8)], dim=-1).to(rope.dtype)
    return tokens[..., :L] * scales[..., :1], tokens[..., L:] * scales[..., 1:]


def rope_without_scale(numbers: Tensor, scales: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.cat([numbers, rope.to(FP8)], dim=-1).to(rope.dtype)
    return tokens[..., :L] * scales[..., :1], tokens[..., L:]


def rope_of_the_same_groups(numbers: Tensor, scales: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.cat([numbers, rope.to(FP8)], dim=-1)
    return times(tokens[..., :L], scales, rope.dtype), times(tokens[..., L:], scales, rope.dtype)


def groups_side_by_side(numbers: Tensor, scales: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    return (numbers.to(rope.dtype).unflatten(-1, (-1, G)) * scales[:, :, None]).flatten(-2), rope


def quantised_again(numbers: Tensor, scales: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    return times(numbers, scales, rope.dtype).to(torch.float8_e5m2).to(rope.dtype), rope


def in_double_precision(numbers: Tensor, scales: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    return times(numbers, scales.double().exp2(), rope.dtype), rope


def in_e5m2(numbers: Tensor, scales: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    return times(numbers.float().to(torch.float8_e5m2), scales, rope.dtype), rope


@pytest.mark.parametrize(
    "read",
    [
        rope_of_another_scale,
        rope_without_scale,
        rope_of_the_same_groups,
        groups_side_by_side,
        quantised_again,
        in_double_precision,
        in_e5m2,
    ],
)
def test_what_the_op_does_not_take_is_dequantised_first(read: Read) -> None:
    call, reason = rewritten(read)
    assert "FP8" not in reason
    assert call[2].meta["val"].dtype == torch.float64


def test_attention_to_all_keys_leaves_it_to_inductor() -> None:
    tensors = inputs()
    module = capture(lambda q, weight, _, *cache: attend(q, *a_buffer(*cache), weight), *tensors)
    before = run(module, *tensors)
    (outcome,) = rewrite(module, "absorbed")
    assert outcome.path == "absorbed"
    (call,) = (n.args for n in module.graph.nodes if n.target is torch.ops.mla.latent_attention.default)
    assert call[2].meta["val"].dtype == torch.float64
    check_right(before, run(module, *tensors))
