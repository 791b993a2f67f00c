"""Dimensions of size 1 that a tensor has serve where such are wanted: none is removed while another is inserted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.passes.algebra.terms import Axis, Digit, Read
from mla_compile.passes.code.reading import read_as, write_as

A, B = Axis(4), Axis(6)
A_OF, B_OF = (Digit(A, 4),), (Digit(B, 6),)
OPS = torch.ops.aten


def ops_of(code, tensor: Tensor) -> list:
    return [node.target for node in make_fx(code)(tensor).graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("dims", "layout", "shape", "ops"),
    [
        (((), A_OF, (), B_OF), ((), (), (A,), (B,)), (1, 1, 4, 6), [OPS.permute.default]),
        (((), A_OF, B_OF), ((), (A,), (B,)), (1, 4, 6), []),
        (((), A_OF, (), B_OF), ((A,), (), (B,)), (4, 1, 6), None),
        ((A_OF, B_OF), ((B,), (), (A,)), (6, 1, 4), None),
        (((), A_OF, (), B_OF), ((A, B),), (24,), None),
    ],
    ids=["two moved", "one that stays", "one of two", "one more", "none wanted"],
)
def test_read_and_written(dims, layout, shape, ops) -> None:
    read = Read("x", dims)
    tensor = torch.arange(24.0).reshape([4 if dim is A_OF else 6 if dim is B_OF else 1 for dim in dims])

    def code(x: Tensor) -> Tensor:
        return read_as(x, read, layout, int, broadcast=True)

    expected = tensor.reshape(4, 6)
    if [axis for dim in layout for axis in dim] == [B, A]:
        expected = expected.T
    result = code(tensor)
    assert torch.equal(result, expected.reshape(shape))
    assert ops is None or ops_of(code, tensor) == ops
    back = [tuple(digit.axis for digit in dim) for dim in dims]
    assert torch.equal(write_as(result, layout, back, int), tensor)
    assert ops is None or ops_of(lambda x: write_as(x, layout, back, int), result) == ops


def test_what_depends_on_nothing_there_keeps_its_size() -> None:
    read, tensor = Read("x", ((), A_OF)), torch.arange(4.0).reshape(1, 4)
    assert read_as(tensor, read, ((), (B,), (A,)), int, broadcast=False).shape == (1, 1, 4)
