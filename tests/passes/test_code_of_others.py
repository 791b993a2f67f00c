"""What people do to MLA when they write it: each is rewritten and right, on both paths, or stays as it is and right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, fx

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_right
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SQ, Function, N, P, R, T


def scored(change: Function) -> Function:
    """MLA by hand, something done to its scores."""
    return lambda *args: mla.softmax(*mla.naive(*args), change)


def hidden(blind: bool = False, shift: int = 0) -> Tensor:
    """Keys behind a query, or those `shift` further; all of them for the second query if it is `blind`."""
    rows = torch.arange(SQ)[:, None]
    return (torch.arange(T) - shift > rows + T - SQ) | (blind & (rows == 1))


def filled(number: float, blind: bool = False, shift: int = 0) -> Function:
    return lambda scores: scores.masked_fill(hidden(blind, shift), number)


def heads() -> Tensor:
    """A number a head, [N, 1, 1]."""
    return torch.arange(1, N + 1)[:, None, None].double() / N


def scaled_apart(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """A scale a head of one product, another of the other, and one of their sum."""
    q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
    k_nope, v = mla.up_projected(latent, w_kv)
    scores = (q_nope @ k_nope.mT * heads() + q_rope @ mla.to_heads(k_rope).mT * heads().flip(0)) / heads().exp()
    return scores.softmax(-1) @ v


REWRITTEN: dict[str, Function] = {
    "scores filled with -1e4": scored(filled(-1e4)),
    "a row of nothing but -1e4": scored(filled(-1e4, blind=True)),
    "a row of nothing but -1e4, chosen by where": scored(
        lambda s: torch.where(hidden(blind=True), torch.full((), -1e4).double(), s)
    ),
    "-1e4 before the scale": scored(lambda s: filled(-1e4, blind=True)(s * 3) / 4),
    "-1e4 twice": scored(lambda s: filled(-1e4, shift=-1)(filled(-1e4, blind=True)(s))),
    "a scale that is a tensor": scored(lambda s: s * torch.full((), 1.5).double()),
    "a scale a head": scored(lambda s: s * heads()),
    "a divisor a head, under a mask": scored(lambda s: filled(-torch.inf)(s / heads())),
    "a scale a query": scored(lambda s: torch.arange(1, SQ + 1)[:, None] * s / 4),
    "two scales that are tensors": scored(lambda s: s * heads() / torch.arange(1, SQ + 1)[:, None].double()),
    "scales of two products": scaled_apart,
    "-inf, then -1e4 over some of it": scored(lambda s: filled(-1e4, blind=True)(filled(-torch.inf, shift=-1)(s))),
}


@pytest.mark.parametrize("function", REWRITTEN.values(), ids=REWRITTEN)
def test_both_paths_are_taken_and_right(function: Function) -> None:
    check_rewritten(function, mla.tensors())


KEPT: dict[str, tuple[Function, str]] = {
    "-1e4, then a bias": (scored(lambda s: filled(-1e4, blind=True)(s) + torch.arange(T).double()), "a sum of"),
    "a bias, then -1e4": (
        scored(lambda s: filled(-1e4)(s + filled(-1e4, blind=True)(torch.zeros(SQ, T).double()))),
        "a sum of",
    ),
    "-1e4 and -2e4": (scored(lambda s: filled(-2e4, shift=-1)(filled(-1e4, blind=True)(s))), "a sum of"),
    "a scale a key": (scored(lambda s: s * torch.arange(T).double()), "a sum of"),
    "a scale a head and key": (scored(lambda s: s * heads() * torch.arange(T).double()), "a sum of"),
    "a scale that is made of the score": (scored(lambda s: s * s.sigmoid()), "a sum of"),
    "a scale a head after a mask": (scored(lambda s: filled(-1e4, blind=True)(s) * heads()), "a sum of"),
    "a divisor that is made of the score": (scored(lambda s: s / (s * heads())), "a sum of"),
    "-100": (scored(filled(-100.0)), "a sum of"),
    "-1e4 of which a scale leaves little": (scored(lambda s: filled(-1e4, blind=True)(s * 50) / 50), "a sum of"),
}
"""Near misses: what no chunk can take, with a part of the reason. Few queries may meet the latents all the same."""


@pytest.mark.parametrize(("function", "reason"), KEPT.values(), ids=KEPT)
def test_a_near_miss_is_right_and_no_chunk_takes_it(function: Function, reason: str) -> None:
    captured = capture(function, *mla.tensors())
    before = run(captured, *mla.tensors())
    for path in ("absorbed", "chunked"):
        module = fx.GraphModule(captured, copy.deepcopy(captured.graph))
        (outcome,) = rewrite(module, path)
        assert path == "absorbed" or (not outcome.rewritten and reason in outcome.reason)
        check_right(before, run(module, *mla.tensors()))
