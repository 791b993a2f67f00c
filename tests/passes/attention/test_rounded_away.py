"""An epsilon added to a softmax's sum, or a lower bound of it, is ignored where a sum of 1 or more rounds it away."""

from __future__ import annotations

import pytest
import torch

from tests.errors import assert_as_close_as_eager
from tests.passes import spellings as mla
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import Function
from tests.passes.test_code_of_others import powers, shifted


def by_sum(total: Function) -> Function:
    return lambda e: e / total(e.sum(-1, keepdim=True))


NOTHING: dict[str, Function] = {
    "an epsilon": powers(torch.exp, by_sum(lambda total: total + 5e-8), shifted),
    "an epsilon before, of powers of 2": powers(torch.exp2, by_sum(lambda total: 1e-9 + total), shifted),
    "a least sum": powers(torch.exp, by_sum(lambda total: total.clamp_min(1.0)), shifted),
    "a least sum, of powers of 2": powers(torch.exp2, by_sum(lambda total: total.clamp(min=1e-12)), shifted),
}
SOMETHING: dict[str, Function] = {
    "an epsilon that is not rounded away": powers(torch.exp, by_sum(lambda total: total + 7e-8), shifted),
    "an epsilon less than 0": powers(torch.exp, by_sum(lambda total: total + -1e-9), shifted),
    "a least sum that may be more": powers(torch.exp, by_sum(lambda total: total.clamp_min(1.5)), shifted),
    "a most": powers(torch.exp, by_sum(lambda total: total.clamp(1e-9, 2.0)), shifted),
    "an epsilon beside no greatest": powers(
        torch.exp, by_sum(lambda total: total + 0.5), lambda s: s - s.mean(-1, True)
    ),
}


@pytest.mark.parametrize("function", NOTHING.values(), ids=NOTHING)
def test_what_rounding_takes_from_a_sum_is_nothing(function: Function) -> None:
    tensors = [tensor.float() for tensor in mla.tensors()]
    for path in ("absorbed", "chunked"):
        captured = capture(function, *tensors)
        expected = run(captured, *tensors)
        (outcome,) = rewrite(captured, path)
        assert outcome.rewritten
        assert_as_close_as_eager(run(captured, *tensors), expected, function(*mla.tensors()))


@pytest.mark.parametrize("function", SOMETHING.values(), ids=SOMETHING)
def test_what_it_does_not_take_is_something(function: Function) -> None:
    captured = capture(function, *(tensor.float() for tensor in mla.tensors()))
    (outcome,) = rewrite(captured)
    assert "expected attention weights that add up to 1, found them divided by `" in outcome.reason
