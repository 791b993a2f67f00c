"""Attention weights that are set to 0 after the softmax: as if the scores were masked, or left unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, compiled
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SQ, Function, T

Zeroing = Callable[[Tensor, Tensor], Tensor]
FILLS = (-torch.inf, -1e9, -1e4)


def seen() -> Tensor:
    """Bool `[Sq, T]`: keys up to a query's position, and none for the second query."""
    return torch.ones(SQ, T, dtype=torch.bool).tril(T - SQ) & (torch.arange(SQ) != 1)[:, None]


def weighed(weights: Callable[[Tensor], Tensor]) -> Function:
    """MLA whose attention weights are `weights(scores)`."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return weights(q @ k.mT * mla.SCALE) @ v

    return attention


def after(fill: float, zeroing: Zeroing) -> Function:
    """MLA whose scores are `fill` where they are not seen, with `zeroing` applied to the softmax's weights."""
    return weighed(lambda s: zeroing(s.masked_fill(~seen(), fill).softmax(-1), seen()))


def rows(number: float, keys: bool = False) -> Tensor:
    """`number` at the second query, or at the second key if it is of `keys`; 0 elsewhere."""
    return torch.where(torch.arange(T) == 1 if keys else torch.arange(SQ)[:, None] == 1, number, 0.0).double()


NO_NUMBERS: dict[str, Function] = {
    "NaN added for a query": lambda s: s + rows(torch.nan),
    "NaN added for a key": lambda s: s + rows(torch.nan, keys=True),
    "inf added for a key": lambda s: s + rows(torch.inf, keys=True),
    "NaN for what is hidden": lambda s: s.masked_fill(~seen(), torch.nan),
    "a query times inf": lambda s: s * (1 + rows(torch.inf)),
    "NaN under a function": lambda s: (s + rows(torch.nan)).tanh(),
}


@pytest.mark.parametrize("change", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_rows_that_are_no_numbers_for_another_reason_are_0_too(change: Function) -> None:
    """`nan_to_num` zeroes rows that are NaN because of a bias or a scale, not only those that see no key."""
    function = weighed(lambda s: change(s).softmax(-1).nan_to_num())
    assert function(*mla.tensors()).isfinite().all()
    for path, _, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == path


def test_a_sink_that_is_no_number() -> None:
    """In float32, because attention with sinks is refused in float64."""

    def function(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        sink = rows(torch.nan)[:, :1].expand(*q.shape[:2], SQ, 1)
        scores = torch.cat([q @ k.mT * mla.SCALE, sink], -1).float()
        return scores.softmax(-1).nan_to_num()[..., :-1] @ v.float()

    tensors = [t.float() for t in mla.tensors()]
    for path in ("absorbed", "chunked"):
        module = capture(function, *tensors)
        (outcome,) = rewrite(module, path)
        assert outcome.path == path
        torch.testing.assert_close(run(module, *tensors), function(*tensors))


def powers(scores: Tensor) -> Tensor:
    return (scores - scores.amax(-1, keepdim=True)).exp()


def renormed(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def no_number(weights: Tensor) -> Tensor:
    return torch.where(weights.isnan(), torch.zeros_like(weights), weights)


ROWS_OF_NOTHING: dict[str, Zeroing] = {
    "nan_to_num": lambda w, _: w.nan_to_num(),
    "where no number": lambda w, _: no_number(w),
    "rows with no number": lambda w, _: w.masked_fill(w.isnan().any(-1, keepdim=True), 0.0),
}
HIDDEN_AGAIN: dict[str, Zeroing] = {
    "masked": lambda w, seen: w.masked_fill(~seen, 0.0),
    "where": lambda w, seen: torch.where(seen, w, 0.0),
    "times the mask": lambda w, seen: w * seen,
    "times the mask as numbers": lambda w, seen: seen.to(w.dtype)[None] * w,
    "masked, and nan_to_num": lambda w, seen: w.masked_fill(~seen, 0.0).nan_to_num(),
    "rows that see something": lambda w, seen: w * seen.any(-1, keepdim=True),
    "rows that see nothing": lambda w, seen: w.masked_fill((~seen).all(-1, keepdim=True), 0.0),
}
REWRITTEN = {
    **{name: after(-torch.inf, zeroing) for name, zeroing in ROWS_OF_NOTHING.items()},
    "powers times a mask": weighed(lambda s: renormed(powers(s) * seen())),
    "powers that are masked": weighed(lambda s: renormed(powers(s).masked_fill(~seen(), 0.0))),
    "weights times a mask, divided again": weighed(lambda s: renormed(s.softmax(-1) * seen())),
    "two masks, one before and one after": weighed(
        lambda s: renormed(s.masked_fill(torch.arange(T) == 0, -torch.inf).softmax(-1) * seen())
    ),
}


@pytest.mark.parametrize("function", REWRITTEN.values(), ids=REWRITTEN)
def test_weights_of_hidden_keys_that_are_set_to_0_are_a_softmax(function: Function) -> None:
    check_rewritten(function, mla.tensors())


@pytest.mark.parametrize("weights", [torch.Tensor.exp, torch.softmax])
def test_a_mask_that_is_an_input(weights: Callable[..., Tensor]) -> None:
    """It is looked at for NaN, as masks computed from the weights are."""

    def attention(hidden: Tensor, *args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        scores = (q @ k.mT * mla.SCALE).masked_fill(hidden, -torch.inf)
        w = scores.softmax(-1) if weights is torch.softmax else (scores - scores.amax(-1, keepdim=True)).exp()
        w = w.masked_fill(hidden, 0.0)
        return (w if weights is torch.softmax else w / w.sum(-1, keepdim=True)) @ v

    hidden = torch.ones(SQ, T, dtype=torch.bool).triu(T - SQ + 1)
    check_rewritten(attention, (hidden, *mla.tensors()))


@pytest.mark.diagonal
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("zeroing", HIDDEN_AGAIN.values(), ids=HIDDEN_AGAIN)
def test_weights_of_masked_keys_that_are_set_to_0_are_a_softmax(zeroing: Zeroing, fill: float) -> None:
    check_rewritten(after(fill, zeroing), mla.tensors())


OTHERS: dict[str, Function] = {
    "no mask before": weighed(lambda s: s.softmax(-1) * seen()),
    "another mask before": after(-torch.inf, lambda w, seen: w * seen.roll(1, -1)),
    "the mask the other way round": after(-1e9, lambda w, seen: w * ~seen),
    "the mask the other way round, filled": after(-1e9, lambda w, seen: w.masked_fill(seen, 0.0)),
    "a bias too": weighed(lambda s: (s + seen().log()).masked_fill(~seen(), -1e9).softmax(-1) * seen()),
    "rows that hide something": after(-1e9, lambda w, seen: w.masked_fill((~seen).any(-1, keepdim=True), 0.0)),
    "keys that somebody sees": after(-1e9, lambda w, seen: w * seen.any(0, keepdim=True)),
    "a soft cap before": weighed(lambda s: s.tanh().masked_fill(~seen(), -1e9).softmax(-1) * seen()),
    "a finite number before, divided again": weighed(
        lambda s: renormed(s.masked_fill(torch.arange(T) < T - 2, -1e9).softmax(-1) * seen())
    ),
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_weights_of_other_keys_that_are_set_to_0_are_none(function: Function) -> None:
    for _, _, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == "unchanged"
        assert "expected attention weights as a softmax gives them, found that `" in outcome.reason


NO_ATTENTION: dict[str, Function] = {
    "another number": after(-torch.inf, lambda w, _: w.nan_to_num(nan=0.5)),
    "another number where none is": after(-torch.inf, lambda w, _: w.masked_fill(w.isnan(), 0.5)),
    "divided again without zeros in the sum": weighed(lambda s: powers(s) * seen() / powers(s).sum(-1, keepdim=True)),
}


@pytest.mark.parametrize("function", NO_ATTENTION.values(), ids=NO_ATTENTION)
def test_other_numbers_in_the_place_of_weights_stay(function: Function) -> None:
    for _, _, outcomes in compiled(function, mla.tensors()):
        assert not any(outcome.rewritten for outcome in outcomes)


def test_a_product_of_what_was_cast_is_no_attention() -> None:
    """Weights in four bits, two to a byte, each group of columns with a scale and a zero point."""
    heads, rank, group = 4, 32, 8

    def function(q: Tensor, latent: Tensor, packed: Tensor, step: Tensor, low: Tensor) -> Tensor:
        numbers = torch.stack([packed & 15, packed >> 4], -1).flatten(1).unflatten(1, (-1, group))
        kv = F.linear(latent, (numbers.to(q.dtype) * step + low).flatten(1))
        k, v = kv.unflatten(-1, (heads, -1)).transpose(1, 2).split([q.shape[3], 12], -1)
        return mla.softmax(q, k, v)

    packed = torch.randint(256, (heads * (16 + 12), rank // 2), dtype=torch.uint8)
    step, low = torch.rand(2, heads * (16 + 12), rank // group, 1)
    q, latent = torch.randn(2, heads, 1, 16), torch.randn(2, T, rank)
    (outcome,) = rewrite(capture(function, q, latent, packed, step, low), "absorbed")
    assert outcome.path == "absorbed"


def test_weights_that_are_read_before_they_are_set_to_0_exist() -> None:
    def function(*args: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = mla.naive(*args)
        weights = (q @ k.mT * mla.SCALE).masked_fill(~seen(), -torch.inf).softmax(-1)
        return weights.nan_to_num() @ v, weights.sum(-2)

    (outcome,) = rewrite(capture(function, *mla.tensors()), "chunked")
    assert outcome.reason.startswith(
        "expected attention weights that only the product with the values reads, found that they "
        "are also read by `sum_1`"
    )
