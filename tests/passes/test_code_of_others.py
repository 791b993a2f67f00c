"""What people do to MLA when they write it: each is rewritten and right, on both paths, or stays as it is and right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, fx

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_right
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SQ, Function, T


def scored(change: Function) -> Function:
    """MLA by hand, something done to its scores."""
    return lambda *args: mla.softmax(*mla.naive(*args), change)


def hidden(blind: bool = False, shift: int = 0) -> Tensor:
    """Keys behind a query, or those `shift` further; all of them for the second query if it is `blind`."""
    rows = torch.arange(SQ)[:, None]
    return (torch.arange(T) - shift > rows + T - SQ) | (blind & (rows == 1))


def filled(number: float, blind: bool = False, shift: int = 0) -> Function:
    return lambda scores: scores.masked_fill(hidden(blind, shift), number)


REWRITTEN: dict[str, Function] = {
    "scores filled with -1e4": scored(filled(-1e4)),
    "a row of nothing but -1e4": scored(filled(-1e4, blind=True)),
    "a row of nothing but -1e4, chosen by where": scored(
        lambda s: torch.where(hidden(blind=True), torch.full((), -1e4).double(), s)
    ),
    "-1e4 before the scale": scored(lambda s: filled(-1e4, blind=True)(s * 3) / 4),
    "-1e4 twice": scored(lambda s: filled(-1e4, shift=-1)(filled(-1e4, blind=True)(s))),
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
