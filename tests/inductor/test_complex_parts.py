"""Complex numbers as real and imaginary parts: the same numbers, and no complex arithmetic is left where it can go."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.inductor import complex_parts
from mla_compile.inductor.retrace import retrace

B, T, N, R = 2, 5, 3, 8
aten = torch.ops.aten


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, R)


def angles() -> Tensor:
    return torch.randn(9, R // 2)


def rotated(x: Tensor, factors: Tensor) -> Tensor:
    """DeepSeek's own rope."""
    numbers = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * factors.view(1, x.size(1), 1, -1)).flatten(3).to(x.dtype)


def of_a_buffer(x, factors):
    return rotated(x, factors[2 : 2 + T])


def of_angles(x, angle):
    return rotated(x, torch.polar(torch.ones_like(angle), angle)[:T])


def of_positions(x, angle, positions):
    return rotated(x, torch.polar(torch.ones_like(angle), angle)[positions])


def scaled(x, angle):
    return rotated(x, torch.polar(torch.full_like(angle, 0.7), angle)[:T] * 1.3)


def by_real_numbers(x, factors, number):
    factors = factors[:T] * number[:, None]
    return rotated(x, number[:, None] * factors)


def backwards(x, factors):
    return rotated(x, factors[:T].conj())


def back_again(x, angle):
    factors = torch.polar(torch.ones_like(angle), angle)[:T]
    return rotated(rotated(x, factors), factors.conj())


def heads_first(x, factors):
    numbers = torch.view_as_complex(x.transpose(1, 2).reshape(B, N, T, -1, 2))
    product = (numbers * factors[None, None, :T]).permute(0, 2, 1, 3).unsqueeze(1).squeeze(1)
    return torch.view_as_real(product[:, -2:, 0]).expand(B, 2, R // 2, 2)


def with_complex_results(x, angle):
    factors = torch.polar(torch.ones_like(angle), angle)[:T]
    return rotated(x, factors), factors, factors[1:].sum(0)


def times_i(x, factors):
    return rotated(x, factors[:T] * 1j)


REAL, COMPLEX = (x_of(B, T, N), angles()), (x_of(B, T, N), torch.randn(9, R // 2, dtype=torch.complex64))
CASES = {
    "factors of a buffer": (of_a_buffer, COMPLEX),
    "of angles": (of_angles, REAL),
    "of positions": (of_positions, (*REAL, torch.tensor([4, 0, 8, 8, 1]))),
    "times a number": (scaled, REAL),
    "times real numbers": (by_real_numbers, (*COMPLEX, torch.randn(T))),
    "conjugate": (backwards, COMPLEX),
    "and back": (back_again, REAL),
    "heads first": (heads_first, COMPLEX),
    "complex results": (with_complex_results, REAL),
    "times i": (times_i, COMPLEX),
    "bfloat16": (of_a_buffer, (COMPLEX[0].bfloat16(), COMPLEX[1])),
    "float64": (of_angles, (REAL[0], REAL[1].double())),
}


def traced(function, inputs):
    """The graph before the second trace."""
    return make_fx(torch.func.functionalize(function, remove="mutations"), tracing_mode="fake")(*inputs)


def complex_ops(module):
    """The ops that compute complex numbers."""
    calls = (node for node in module.graph.nodes if node.op == "call_function")
    return {node.target for node in calls if isinstance(node.meta["val"], Tensor) and node.meta["val"].is_complex()}


@pytest.fixture
def in_parts(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(complex_parts, "pays", lambda real: True)


@pytest.mark.parametrize(("function", "inputs"), CASES.values(), ids=CASES)
@torch.no_grad()
def test_numbers_are_those_of_complex_arithmetic(in_parts, function, inputs):
    found, expected = retrace(traced(function, inputs))(*inputs), function(*inputs)
    torch.testing.assert_close(found, expected)


STAY = {"complex results", "times i"}
"""Cases in which complex numbers are results, or a factor is written as one."""


@pytest.mark.parametrize("case", sorted(CASES.keys() - STAY))
@torch.no_grad()
def test_no_complex_arithmetic_is_left(in_parts, case):
    module = traced(*CASES[case])
    assert aten.mul.Tensor in complex_ops(module)
    assert not complex_ops(retrace(module))


@torch.no_grad()
def test_a_cpu_keeps_complex_arithmetic():
    module = traced(*CASES["of angles"])
    assert {aten.mul.Tensor, aten.polar.default} <= complex_ops(retrace(module))
