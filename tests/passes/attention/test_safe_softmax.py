"""A softmax by hand whose rows that see no key are 0: their maximum is replaced by a number, their sum is bounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.attention.test_zeroed import seen, weighed
from tests.passes.checks import check_rewritten, compiled
from tests.passes.graphs import capture, rewrite
from tests.passes.spellings import SQ, Function

Change = Callable[[Tensor], Tensor]


def by_index(greatest: Tensor) -> Tensor:
    greatest = greatest.clone()
    greatest[greatest == -torch.inf] = 0.0
    return greatest


FINITE: dict[str, Change] = {
    "where finite": lambda m: torch.where(m.isfinite(), m, torch.zeros_like(m)),
    "where not infinite": lambda m: torch.where(m.isinf(), 0.0, m),
    "where more than -inf": lambda m: torch.where(m > -torch.inf, m, 0.0),
    "where not -inf": lambda m: m.masked_fill(m == -torch.inf, 1.0),
    "where another than -inf": lambda m: torch.where(m != -torch.inf, m, 0.0),
    "masked where not finite": lambda m: m.masked_fill(~m.isfinite(), 0.0),
    "nan_to_num": lambda m: m.nan_to_num(neginf=0.0),
    "by index": by_index,
}
BOUNDED: dict[str, Change] = {
    "clamped": lambda total: total.clamp_min(1e-20),
    "with an epsilon": lambda total: total + 1e-20,
    "an epsilon with it": lambda total: 1e-20 + total,
}
NO_BOUND: dict[str, Change] = {"the sum": lambda total: total, "clamped to 0": lambda total: total.clamp(min=0.0)}
AFTER: dict[str, Change] = {
    "as they are": lambda e: e,
    "masked": lambda e: e.masked_fill(~seen(), 0.0),
    "times the mask": lambda e: e * seen(),
}


def by_hand(finite: Change, bound: Change, after: Change = lambda e: e, fill: float = -torch.inf) -> Function:
    """MLA whose powers of scores, shifted by their `finite` maximum, are set to 0 by `after` and divided by the sum."""

    def weights(scores: Tensor) -> Tensor:
        scores = scores.masked_fill(~seen(), fill)
        powers = after((scores - finite(scores.amax(-1, keepdim=True))).exp())
        return powers / bound(powers.sum(-1, keepdim=True))

    return weighed(weights)


@pytest.mark.diagonal
@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER)
@pytest.mark.parametrize("bound", (BOUNDED | NO_BOUND).values(), ids=BOUNDED | NO_BOUND)
@pytest.mark.parametrize("finite", FINITE.values(), ids=FINITE)
def test_rows_that_see_no_key_are_what_they_are_by_hand(finite: Change, bound: Change, after: Change) -> None:
    function = by_hand(finite, bound, after)
    assert function(*mla.tensors()).isnan().any() == (bound in NO_BOUND.values())
    check_rewritten(function, mla.tensors())


@pytest.mark.parametrize("bound", BOUNDED.values(), ids=BOUNDED)
def test_rows_of_nan_that_are_masked_again(bound: Change) -> None:
    function = by_hand(lambda m: m, bound, AFTER["masked"])
    assert function(*mla.tensors()).isfinite().all()
    check_rewritten(function, mla.tensors())


def test_rows_of_nan_times_a_mask() -> None:
    function = by_hand(lambda m: m, BOUNDED["clamped"], AFTER["times the mask"])
    assert function(*mla.tensors()).isnan().any()
    check_rewritten(function, mla.tensors())


def of_two_masks(finite: Change) -> Function:
    """One mask hides keys before the softmax, another hides some before it and all of its own after it."""

    def weights(scores: Tensor) -> Tensor:
        scores = scores.masked_fill(torch.arange(SQ)[:, None] == 2, -torch.inf).masked_fill(~seen(), -torch.inf)
        powers = (scores - finite(scores.amax(-1, keepdim=True))).exp().masked_fill(~seen(), 0.0)
        return powers / powers.sum(-1, keepdim=True).clamp_min(1e-20)

    return weighed(weights)


def test_two_masks_one_of_which_is_applied_again() -> None:
    """The rows that the other hides are 0 where their maximum was replaced; where it was not, some are and some not."""
    check_rewritten(of_two_masks(FINITE["nan_to_num"]), mla.tensors())
    for _, _, (outcome,) in compiled(of_two_masks(lambda m: m), mla.tensors()):
        assert outcome.reason.startswith("expected attention weights as a softmax gives them, found that `")


@pytest.mark.parametrize("bound", BOUNDED.values(), ids=BOUNDED)
@pytest.mark.parametrize("finite", [FINITE["nan_to_num"], lambda m: m], ids=["finite", "as it is"])
def test_a_bounded_sum_that_divides_the_product(finite: Change, bound: Change) -> None:
    def function(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        scores = (q @ k.mT * mla.SCALE).masked_fill(~seen(), -torch.inf)
        powers = (scores - finite(scores.amax(-1, keepdim=True))).exp()
        return powers @ v / bound(powers.sum(-1, keepdim=True))

    check_rewritten(function, mla.tensors())


OTHERS: dict[str, Function] = {
    "a finite number for what is hidden": by_hand(FINITE["nan_to_num"], BOUNDED["clamped"], AFTER["masked"], -1e9),
    "another mask after": by_hand(FINITE["nan_to_num"], BOUNDED["clamped"], lambda e: e * seen().roll(1, -1)),
    "a maximum that is bounded itself": by_hand(lambda m: m.clamp_min(0.5), BOUNDED["clamped"]),
    "a maximum where the row has numbers": by_hand(lambda m: torch.where(m.isnan(), 0.0, m) * 0.5, BOUNDED["clamped"]),
}


def test_a_bound_that_its_dtype_does_not_hold_is_none() -> None:
    """1e-20 is 0 in float16, so that rows which see no key are NaN: they are left alone."""
    whole = by_hand(FINITE["nan_to_num"], lambda total: total.half() + 1e-20)
    (outcome,) = rewrite(capture(whole, *mla.tensors()))
    assert "expected attention weights that add up to 1, found them divided by `" in outcome.reason


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_a_bound_that_counts_for_rows_that_see_keys_stays(function: Function) -> None:
    for _, _, outcomes in compiled(function, mla.tensors()):
        assert not any(outcome.rewritten for outcome in outcomes)
