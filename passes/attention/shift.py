"""What a softmax does not see: a number that is subtracted from all scores of a row, such as their maximum.

softmax((s - s.amax(-1, keepdim=True)) * 2)  ->  softmax(2 s)
"""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import fx

from ..nodes.arguments import arguments, aten, is_tensor
from ..nodes.constants import number_in
from ..trace.trace import Trace
from .copies import original_of
from .finite import before_finite


def without_shift(node: fx.Node, dim: int, trace: Trace) -> tuple[fx.Node, float]:
    """Scores before their maximum was subtracted from each row and before a positive factor, and that factor.

    A softmax does not see the shift: a row of -inf alone is NaN either way.
    """
    factor = 1.0
    while True:
        source, scale = whole_source(node, trace)
        if source is None:
            return node, factor
        a, b = (*arguments(source), None, None)[:2]
        if source.target is aten.sub.Tensor and not source.kwargs and is_tensor(b) and is_greatest(b, a, dim, trace):
            node, factor = a, factor * scale
        elif source.target is aten.mul.Tensor and (number := number_in(b) or 0) > 0:
            node, factor = a, factor * scale * number
        elif source.target is aten.div.Tensor and (number := number_in(b) or 0) > 0:
            node, factor = a, factor * scale / number
        else:
            return node, factor


def whole_source(node: fx.Node, trace: Trace) -> tuple[fx.Node | None, float]:
    """The tensor whose elements `node` holds, dimension by dimension, and the positive factor between the two."""
    original = original_of(node, trace)
    if original is None or any(factor <= 0 for factor in original.factors):
        return None, 1.0
    return original.node, math.prod(original.factors)


def is_greatest(node: fx.Node, scores: Any, dim: int, trace: Trace) -> bool:
    """Whether `node` is the maximum of `scores` along `dim`, which it keeps, or another number where that is -inf."""
    found = before_finite(node, trace)
    source, factor = whole_source(node if found is None else found, trace)
    if source is None or factor != 1.0 or not is_tensor(scores):
        return False
    if source.target is operator.getitem and arguments(source)[1] == 0:
        source = arguments(source)[0]
    if source.target not in (aten.amax.default, aten.max.dim):
        return False
    of, dims, keep = (*arguments(source), None, None)[:3]
    dims = dims if isinstance(dims, list | tuple) else [dims]
    rank = len(trace[scores].dims)
    return bool(keep) and [d % rank for d in dims] == [dim] and bool(trace[of] == trace[scores])
