"""MLA under any mask is rewritten and stays right, even in rows that are masked everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, compiled
from tests.passes.spellings import SCALE, SQ, B, Function, N, T


def masks() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    allowed = torch.rand(B, 1, SQ, T, generator=generator) > 0.3
    allowed[..., 0] = True
    bias = torch.randn(B, 1, SQ, T, generator=generator, dtype=torch.float64)
    return {
        "allowed": allowed,
        "one query's": allowed[:, :, :1],
        "matrix": allowed[0, 0],
        "bias": bias,
        "bias of minus infinity": bias.masked_fill(~allowed, -math.inf),
        "bias of keys": bias[:1, :, :1],
        "bias of each head": bias.expand(B, N, SQ, T) * torch.arange(1, N + 1)[:, None, None],
    }


@pytest.mark.parametrize("mask", masks().values(), ids=masks())
def test_sdpa_with_a_mask(mask: Tensor) -> None:
    for path, _, (outcome,) in compiled(lambda m, *args: mla.sealed(*mla.naive(*args), m), (mask, *mla.tensors())):
        assert outcome.path == path


def test_causal_sdpa() -> None:
    check_rewritten(lambda *args: mla.sealed(*mla.naive(*args), causal=True), mla.tensors())


MASKED: dict[str, Function] = {
    "masked_fill": lambda s, seen, bias: s.masked_fill(~seen, -math.inf),
    "masked_fill of a large number": lambda s, seen, bias: s.masked_fill(~seen, torch.finfo(torch.float64).min),
    "where": lambda s, seen, bias: torch.where(seen, s, -math.inf),
    "where the other way round": lambda s, seen, bias: torch.where(~seen, -math.inf, s),
    "where with a tensor": lambda s, seen, bias: torch.where(seen, s, torch.full((), -math.inf, dtype=s.dtype)),
    "bias": lambda s, seen, bias: s + bias,
    "bias from the left": lambda s, seen, bias: bias + s,
    "bias taken away": lambda s, seen, bias: s - bias,
    "bias before the scale": lambda s, seen, bias: (s / SCALE + bias) * SCALE,
    "bias from the mask": lambda s, seen, bias: (
        s + torch.zeros(s.shape[-2:], dtype=s.dtype).masked_fill(~seen, -math.inf)
    ),
    "bias times a number": lambda s, seen, bias: s + (1.0 - seen.double()) * -1e9,
    "bias and mask": lambda s, seen, bias: (s + bias).masked_fill(~seen, -math.inf),
    "mask and bias": lambda s, seen, bias: s.masked_fill(~seen, -math.inf) + bias,
    "two masks": lambda s, seen, bias: s.masked_fill(~seen, -math.inf).masked_fill(bias > 2, -math.inf),
    "a bool tensor added": lambda s, seen, bias: s + seen,
    "a whole number added": lambda s, seen, bias: s + (torch.arange(T) - torch.arange(SQ)[:, None]),
    "a bias a head": lambda s, seen, bias: s + torch.arange(N)[:, None, None] * bias[:, :1, :1],
}


@pytest.mark.parametrize("change", MASKED.values(), ids=MASKED)
def test_softmax_by_hand_with_masks(change: Function) -> None:
    given = masks()

    def attention(seen: Tensor, bias: Tensor, *args: Tensor) -> Tensor:
        return mla.softmax(*mla.naive(*args), lambda s: change(s, seen, bias))

    for path, _, (outcome,) in compiled(attention, (given["allowed"], given["bias"], *mla.tensors())):
        assert outcome.path == path


@pytest.mark.parametrize(
    "fill", [-math.inf, -1e30, torch.finfo(torch.float32).min], ids=["minus infinity", "-1e30", "least float32"]
)
def test_a_row_that_is_masked_everywhere(fill: float) -> None:
    """NaN with minus infinity, the mean of all values with a finite number: as before the passes."""
    seen = torch.ones(SQ, T, dtype=torch.bool)
    seen[1] = False

    def attention(seen: Tensor, *args: Tensor) -> Tensor:
        return mla.softmax(*mla.naive(*args), lambda s: s.masked_fill(~seen, fill))

    for path, _, (outcome,) in compiled(attention, (seen, *mla.tensors())):
        assert outcome.path == path


def test_a_row_that_two_finite_masks_reject_everywhere() -> None:
    """Left padding: padding and causality together reject all keys of a row, each of which then weighs the same."""
    causal = torch.ones(SQ, T, dtype=torch.bool).tril(2)
    padding = (torch.arange(T) >= 4).expand(SQ, T)

    def attention(causal: Tensor, padding: Tensor, *args: Tensor) -> Tensor:
        return mla.softmax(*mla.naive(*args), lambda s: s.masked_fill(~causal, -1e30).masked_fill(~padding, -1e30))

    for path, _, (outcome,) in compiled(attention, (causal, padding, *mla.tensors())):
        assert outcome.path == path


def test_a_row_that_infinity_rejects_in_part_and_a_finite_bias_in_the_rest() -> None:
    """Keys that minus infinity rejects stay rejected, although a finite mask is added afterwards."""
    causal = torch.ones(SQ, T, dtype=torch.bool).tril(2)
    padding = (torch.arange(T) >= 4).expand(SQ, T)

    def attention(causal: Tensor, padding: Tensor, *args: Tensor) -> Tensor:
        zero = torch.zeros(SQ, T, dtype=torch.float64)
        bias = torch.where(padding, zero, -1e30)
        return mla.softmax(*mla.naive(*args), lambda s: s.masked_fill(~causal, -math.inf) + bias)

    for path, _, (outcome,) in compiled(attention, (causal, padding, *mla.tensors())):
        assert outcome.path == path


def test_a_finite_fill_that_a_scale_makes_small_is_not_a_mask() -> None:
    seen = torch.ones(SQ, T, dtype=torch.bool)
    seen[1] = False

    def attention(seen: Tensor, *args: Tensor) -> Tensor:
        return mla.softmax(*mla.naive(*args), lambda s: s.masked_fill(~seen, -1e18) / 1e16)

    for path, _, (outcome,) in compiled(attention, (seen, *mla.tensors())):
        assert (outcome.path, outcome.mask) == (path, "none")
