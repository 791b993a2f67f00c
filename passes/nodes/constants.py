"""Numbers that are constants of a graph, as tensors of one value."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from .arguments import arguments, aten


def constant_of(value: Any) -> float | None:
    """The number that a tensor of one value holds, in its dtype, if it is a constant of the graph; else None."""
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, fx.Node) and value.op == "call_function":
        match value.target:
            case aten.full.default | aten.full_like.default:
                return _rounded(constant_of(arguments(value)[1]), value)
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
    if isinstance(value, fx.Node) and value.op == "get_attr":
        tensor = getattr(value.graph.owning_module, str(value.target), None)
        if isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and not isinstance(tensor, FakeTensor):
            with unset_fake_temporarily():  # the compiler's fake mode, in which no tensor has a value
                return float(tensor.item())
    return None


def _rounded(number: float | None, node: fx.Node) -> float | None:
    """A number as a tensor in the dtype of `node` holds it: 0.1 in bfloat16 is 0.10009765625."""
    if number is None:
        return None
    with unset_fake_temporarily():
        return float(torch.tensor(number, dtype=torch.float64).to(node.meta["val"].dtype).item())
