"""Numbers that are constants of a graph: what a tensor of one value holds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_compile.passes.nodes.constants import constant_of
from tests.passes.graphs import capture


def made(function: Callable[[Tensor], Tensor]) -> float | None:
    """What is known of the result of a function of a tensor."""
    (output,) = capture(function, torch.ones(2, dtype=torch.float32)).graph.find_nodes(op="output")
    return constant_of(output.args[0])


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (lambda x: torch.full((), 0.1), float(torch.tensor(0.1))),
        (lambda x: torch.full((), 0.1, dtype=torch.float64), 0.1),
        (lambda x: torch.full((), 0.1).bfloat16(), 0.10009765625),
        (lambda x: torch.full((), 0.1).bfloat16().float(), 0.10009765625),
        (lambda x: torch.full((3,), -1e9).half(), -math.inf),
        (lambda x: torch.full_like(x, 2.5).long(), 2.0),
        (lambda x: x.new_full((), 0.1), float(torch.tensor(0.1))),
        (lambda x: x.new_full((2,), -1e9, dtype=torch.float16), -math.inf),
        (lambda x: torch.tensor(0.1), float(torch.tensor(0.1))),
        (lambda x: torch.tensor(7).expand(3), 7.0),
        (lambda x: torch.sqrt(torch.tensor(2.0)), float(torch.tensor(2.0).sqrt())),
        (lambda x: 1 / torch.full((), 3.0).bfloat16(), 0.333984375),
        (lambda x: (-torch.tensor(4.0).rsqrt() * 2.0) ** 3, -1.0),
        (lambda x: torch.tensor(8) / 3, float(torch.tensor(8) / 3)),
    ],
)
def test_a_constant_is_what_its_dtype_holds(function: Callable[[Tensor], Tensor], value: float) -> None:
    assert made(function) == value


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        lambda x: x[0],
        lambda x: x.exp(),
        lambda x: x[0] * torch.tensor(2.0),
        lambda x: torch.arange(3),
        lambda x: x.sum().half(),
    ],
)
def test_what_depends_on_an_input_or_has_several_values_is_none(function: Callable[[Tensor], Tensor]) -> None:
    assert made(function) is None
