"""Numbers that are constants of a graph, as tensors of one value."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from .arguments import arguments, aten, is_tensor

_FUNCTIONS = {
    aten.div.Tensor,
    aten.exp.default,
    aten.log.default,
    aten.mul.Tensor,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.reciprocal.default,
    aten.rsqrt.default,
    aten.sqrt.default,
}
"""Functions of numbers, by which scales are computed: `1 / torch.sqrt(torch.tensor(64.0))`."""


def number_in(operand: Any) -> float | None:
    """The finite number that an operand is, if it is one: a Python number, or a constant tensor without dimensions."""
    number = None if is_tensor(operand) and operand.meta["val"].dim() else constant_of(operand)
    return number if number is not None and math.isfinite(number) else None


def constant_of(value: Any) -> float | None:
    """The number that a tensor of one value holds, in its dtype, if it is a constant of the graph; else None."""
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, fx.Node) and value.op == "call_function":
        match value.target:
            case aten.full.default | aten.full_like.default:
                return _rounded(constant_of(arguments(value)[1]), value)
            case aten.new_full.default:
                return _rounded(constant_of(arguments(value)[2]), value)
            case aten.zeros.default | aten.zeros_like.default | aten.new_zeros.default:
                return 0.0
            case aten.scalar_tensor.default | aten._to_copy.default:
                return _rounded(constant_of(arguments(value)[0]), value)
            case (
                aten.lift_fresh_copy.default
                | aten.expand.default
                | aten.clone.default
                | aten.detach.default
                | aten.alias.default
            ):
                return constant_of(arguments(value)[0])
            case function if function in _FUNCTIONS:
                return _computed(value)
    if isinstance(value, fx.Node) and value.op == "get_attr":
        tensor = getattr(value.graph.owning_module, str(value.target), None)
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or tensor.is_complex():
            return None
        if tensor.numel() == 1:
            with unset_fake_temporarily():  # the compiler's fake mode, in which no tensor has a value
                return float(tensor.item())
    return None


def _computed(node: fx.Node) -> float | None:
    """What a function makes of constants, in the dtypes of the graph; None if its operands are not all known."""
    function: Any = node.target
    operands, numbers = arguments(node), [constant_of(operand) for operand in arguments(node)]
    if node.kwargs or any(number is None for number in numbers):
        return None
    with unset_fake_temporarily():
        known = [
            torch.tensor(number, dtype=operand.meta["val"].dtype) if is_tensor(operand) else operand
            for operand, number in zip(operands, numbers, strict=True)
        ]
        return float(function(*known).to(node.meta["val"].dtype).item())


def _rounded(number: float | None, node: fx.Node) -> float | None:
    """A number as a tensor in the dtype of `node` holds it: 0.1 in bfloat16 is 0.10009765625."""
    if number is None:
        return None
    with unset_fake_temporarily():
        return float(torch.tensor(number, dtype=torch.float64).to(node.meta["val"].dtype).item())
