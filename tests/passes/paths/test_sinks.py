"""Sinks, scores without values, take a share of a softmax's weights: sites with sinks are rewritten and keep it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tests.errors import assert_as_close_as_eager
from tests.passes import spellings as mla
from tests.passes.checks import unfolded
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SCALE, SQ, B, Function, N, T


def attention(weights: Function) -> Function:
    """MLA whose attention weights are `weights(scores, sink)`; `sink` is one number per head, as `[B, N, Sq, 1]`."""

    def function(sink: Tensor, *args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        scores = (q @ k.transpose(-1, -2)) * SCALE
        return weights(scores, sink.view(1, N, 1, 1).expand(B, N, SQ, 1)).to(v.dtype) @ v

    return function


def masked(scores: Tensor) -> Tensor:
    """Masked scores: the first query sees no key, the second sees one."""
    seen = torch.ones(SQ, T, dtype=torch.bool).tril(-1)
    return scores.masked_fill(~seen, -math.inf)


def shifted(scores: Tensor) -> Tensor:
    return scores - scores.max(dim=-1, keepdim=True).values


def rounded(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.bfloat16()


def more(
    numerator: Function, addend: Function, shift: Function = lambda s, sink: 0, change: Function = lambda s: s
) -> Function:
    """Exponentials divided by their sum and `addend`; before that, `shift` is subtracted from each row."""

    def weights(scores: Tensor, sink: Tensor) -> Tensor:
        scores = change(scores)
        taken = shift(scores, sink)
        e = numerator(scores - taken if isinstance(taken, Tensor) else scores)
        return e / (addend(sink, taken) + e.sum(-1, keepdim=True))

    return weights


def greatest(scores: Tensor, sink: Tensor) -> Tensor:
    return scores.amax(-1, keepdim=True)


def all_but_some(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(SQ, T, dtype=torch.bool).triu(T - SQ + 1), -math.inf)


SINKS: dict[str, Function] = {
    "one more": more(torch.exp, lambda sink, _: 1),
    "a number more, of powers of 2": more(torch.exp2, lambda sink, _: 0.3),
    "one more, masked": more(torch.exp, lambda sink, _: 1, change=masked),
    "a score of 0, shifted": more(torch.exp, lambda sink, m: torch.exp(-m), greatest, all_but_some),
    "a score of 0, shifted, of rows of nothing": more(torch.exp, lambda sink, m: torch.exp(-m), greatest, masked),
    "three scores of 0": more(torch.exp, lambda sink, m: torch.exp(m * -1) * 3, greatest, all_but_some),
    "a score of 0 that is seen to": more(
        torch.exp, lambda sink, m: torch.exp(-m), lambda s, _: s.amax(-1, keepdim=True).clamp(min=0), masked
    ),
    "a sink by hand": more(torch.exp, lambda sink, _: sink.exp()),
    "a sink by hand, shifted": more(torch.exp, lambda sink, m: (sink - m).exp(), greatest, all_but_some),
    "a sink by hand, shifted, of rows of nothing": more(torch.exp, lambda sink, m: (sink - m).exp(), greatest, masked),
    "a sink by hand that is seen to": more(
        torch.exp, lambda sink, m: (sink - m).exp(), lambda s, sink: s.amax(-1, keepdim=True).maximum(sink), masked
    ),
    "a sink and a number": more(torch.exp, lambda sink, _: sink.exp() + 2),
    "zeros beside the scores": lambda s, sink: F.pad(masked(s), (1, 0)).softmax(-1)[..., 1:],
    "numbers beside the scores": lambda s, sink: F.pad(s, (2, 1), value=0.5).mul(2).softmax(-1)[..., 2:-1],
    "last": lambda s, sink: torch.cat([s, sink], -1).softmax(-1)[..., :-1],
    "first": lambda s, sink: torch.cat([sink, s], -1).softmax(-1)[..., 1:],
    "two": lambda s, sink: torch.cat([sink, s, 2 * sink], -1).softmax(-1)[..., 1 : T + 1],
    "one of many keys": lambda s, sink: torch.cat([s, sink.expand(-1, -1, -1, 3)], -1).softmax(-1)[..., :T],
    "less the greatest": lambda s, sink: shifted(torch.cat([s, sink], -1)).softmax(-1)[..., :-1],
    "less amax": lambda s, sink: ((c := torch.cat([s, sink], -1)) - c.amax(-1, keepdim=True)).softmax(-1)[..., :-1],
    "scaled together": lambda s, sink: (torch.cat([s * 2, sink], -1) / 2).softmax(-1)[..., :-1],
    "cast together": lambda s, sink: rounded(torch.cat([s, sink], -1)).softmax(-1, dtype=torch.float32)[..., :-1],
    "of masked scores": lambda s, sink: torch.cat([masked(s), sink], -1).softmax(-1)[..., :-1],
    "of numbers for masked scores": lambda s, sink: torch.cat(
        [s + torch.full((SQ, T), torch.finfo(torch.float32).min).triu(0), sink], -1
    ).softmax(-1)[..., :-1],
    "minus infinity": lambda s, sink: torch.cat([masked(s), sink - math.inf], -1).softmax(-1)[..., :-1],
    "of nothing, but shifted": lambda s, sink: shifted(s).softmax(-1),
}


def tensors() -> tuple[Tensor, ...]:
    return torch.linspace(-2, 3, N), *(tensor.float() for tensor in mla.tensors())


@pytest.mark.diagonal
@pytest.mark.parametrize("weights", SINKS.values(), ids=SINKS)
@pytest.mark.parametrize("path", ["absorbed", "chunked"])
def test_sinks_keep_their_share(weights: Function, path: str) -> None:
    traced = capture(attention(weights), *tensors())
    naive = run(traced, *tensors())
    exact = attention(weights)(*(tensor.double() for tensor in tensors()))
    module = fx.GraphModule(traced, copy.deepcopy(traced.graph))
    (outcome,) = rewrite(module, path)
    assert (outcome.path, outcome.reason) == (path, "asked for by mla.path")
    assert not unfolded(module)
    assert_as_close_as_eager(run(module, *tensors()), naive, exact)


def later(addend: Callable[[], Tensor]) -> Function:
    return lambda s, sink: (torch.cat([s, sink], -1) + addend()).softmax(-1)[..., :-1]


NOT_SINKS: dict[str, Function] = {
    "one more after a shift": more(torch.exp, lambda sink, _: 1, greatest),
    "something less": more(torch.exp, lambda sink, _: -0.01),
    "shifted by something else": more(torch.exp, lambda sink, m: torch.exp(-m), lambda s, sink: s.mean(-1, True)),
    "a sink that was shifted otherwise": more(torch.exp, lambda sink, m: (sink + m).exp(), greatest),
    "of another base": more(torch.exp2, lambda sink, m: torch.exp(-m), greatest),
    "a mask after the join": later(lambda: torch.arange(T + 1.0)),
    "a number a row after the join": later(lambda: torch.arange(1.0 * SQ)[:, None]),
    "a part of the scores": lambda s, sink: torch.cat([s, s], -1).softmax(-1)[..., 1 : T + 1],
    "dropped keys": lambda s, sink: torch.cat([s.softmax(-1)[..., :-1], sink], -1),
    "another's greatest": lambda s, sink: (torch.cat([s, sink], -1) - s.amax(-1, keepdim=True)).softmax(-1)[..., :-1],
    "the greatest of a column": lambda s, sink: ((c := torch.cat([s, sink], -1)) - c.amax(-2, keepdim=True)).softmax(
        -1
    )[..., :-1],
}


@pytest.mark.parametrize("weights", NOT_SINKS.values(), ids=NOT_SINKS)
def test_what_is_no_sink_stays(weights: Function) -> None:
    module = capture(attention(weights), *tensors())
    before = run(module, *tensors())
    assert {outcome.path for outcome in rewrite(module)} <= {"unchanged"}
    torch.testing.assert_close(run(module, *tensors()), before, rtol=0, atol=0)


def test_float64_would_lose_digits() -> None:
    module = capture(attention(SINKS["last"]), *(tensor.double() for tensor in tensors()))
    (outcome,) = rewrite(module)
    assert outcome.path == "unchanged"
    assert "found float64" in outcome.reason
