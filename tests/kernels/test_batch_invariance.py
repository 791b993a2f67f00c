"""In training, attention gives a sequence the same bits in every run and in every batch, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_compile.kernels.register  # noqa: F401  what the ops compute

B, N, L, P, R, V = 3, 6, 16, 12, 8, 10
SIZES = {"some": (7, 20), "a chunk and more": (70, 90), "blocks of queries": (300, 300)}
WORKSPACE = 64
OF_WEIGHTS = (3, 4)
"""Indices of the gradients of the weights, which are sums over the batch."""


def padded(tokens: int) -> Tensor:
    """The first sequence sees all keys, the second all but some, the third none."""
    lengths = torch.tensor([tokens, tokens // 2, 0])
    return (torch.arange(tokens) < lengths[:, None])[:, None, None]


def numbers(tokens: int) -> Tensor:
    """A bias added to the scores; for the second sequence it hides every key by a finite number."""
    mask = torch.randn(B, N, 1, tokens)
    mask[1] = -1e30
    return mask


MASKS = {"none": lambda tokens: None, "padding": padded, "numbers": numbers}


def run(operands: list[Tensor], weights: list[Tensor], mask: Tensor | None, offset: int) -> list[Tensor]:
    """Output, log-sum-exp, and the gradients of the operands and of the weights."""
    q, latent, k_rope, direction = operands
    settings = mask, offset, 0.3, WORKSPACE
    o, lse = torch.ops.mla.expanded_attention(q, latent, k_rope, *weights, *settings)
    wanted = [True] * 5 + [False]
    grads = torch.ops.mla.expanded_attention_backward(
        direction, None, q, latent, k_rope, *weights, *settings, o, lse, wanted
    )
    return [o, lse, *grads]


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_bits_of_a_sequence_are_its_own(sizes, mask, dtype):
    queries, tokens = SIZES[sizes]
    shapes = (B, queries, N, P + R), (B, tokens, L), (B, tokens, R), (B, queries, N, V)
    operands = [torch.randn(shape).to(dtype) for shape in shapes]
    weights = [torch.randn(N, width, L).to(dtype) / 4 for width in (P, V)]
    seen, offset = MASKS[mask](tokens), tokens - queries
    together = run(operands, weights, seen, offset)
    for first, second in zip(together, run(operands, weights, seen, offset), strict=True):
        assert torch.equal(first, second)
    for b in range(B):
        own = [operand[b : b + 1].clone() for operand in operands]
        alone = run(own, weights, None if seen is None else seen[b : b + 1].clone(), offset)
        for i, (whole, part) in enumerate(zip(together, alone, strict=True)):
            if i - 2 not in OF_WEIGHTS:
                assert torch.equal(whole[b : b + 1], part), f"result {i} of sequence {b}"
