"""Tensors whose numbers are known to be positive."""

from __future__ import annotations

from typing import Any

from torch import fx

from .arguments import RESHAPES, argument, arguments, aten, factor_of, is_tensor
from .constants import constant_of

_ALWAYS = {aten.exp.default, aten.exp2.default, aten.sigmoid.default, aten.softplus.default}
_KEEP = {
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.expand.default,
    aten.permute.default,
    aten.reciprocal.default,
    aten.rsqrt.default,
    aten.slice.Tensor,
    aten.sqrt.default,
    aten.squeeze.dim,
    aten.transpose.int,
    aten.unsqueeze.default,
    *RESHAPES,
}
"""Functions of one tensor whose results are positive if its numbers are."""


def is_positive(value: Any) -> bool:
    """Whether all numbers of a tensor are known to be greater than 0, but for what is NaN or rounded to 0."""
    number = constant_of(value)
    if number is not None or not isinstance(value, fx.Node) or value.op != "call_function":
        return number is not None and number > 0
    if not is_tensor(value) or not value.meta["val"].is_floating_point():
        return False
    match value.target:
        case function if function in _ALWAYS:
            return True
        case function if function in _KEEP:
            return is_positive(arguments(value)[0])
        case aten.mul.Tensor | aten.div.Tensor:
            return all(map(is_positive, arguments(value)[:2]))
        case aten.add.Tensor:
            return (factor_of(value) or 0) > 0 and all(map(is_positive, arguments(value)[:2]))
        case aten.clamp.default | aten.clamp_min.default:
            return is_positive(argument(value, "min"))
    return False
