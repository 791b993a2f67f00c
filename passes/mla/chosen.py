"""Read what a bool tensor chooses elements from: `masked_fill`, `where`, and assignment to the elements it names.

x.masked_fill(m, 0),  x[m] = 0          x where m is False, else 0
where(m, x, y)                          x where m is True, else y
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from ..algebra.terms import Form, How
from ..attention.scores import filled_by_index
from ..attention.zeroed import is_zero
from ..nodes.arguments import NEGATIONS, arguments, aten, is_tensor
from ..trace.trace import Trace


@dataclass(frozen=True)
class Choice:
    """The tensors `of` whose elements a node has where, or unless, its `mask` is True; 0 in the place of all others."""

    of: tuple[tuple[fx.Node, How], ...]
    mask: Form


def choice_of(node: fx.Node, trace: Trace) -> Choice | None:
    """What a node chooses; None if it does something else, or has another number than 0 in the place of some."""
    match node.target:
        case aten.where.self:
            mask, first, second = arguments(node)
            hows = How.WHERE, How.UNLESS
        case aten.masked_fill.Scalar | aten.masked_fill.Tensor:
            first, mask, second = arguments(node)
            hows = How.UNLESS, How.WHERE
        case aten.index_put.default if (filled := filled_by_index(node)) is not None:
            first, (mask, second) = arguments(node)[0], filled
            hows = How.UNLESS, How.WHERE
        case _:
            return None
    while mask.target in NEGATIONS:
        (mask,) = arguments(mask)
        hows = hows[::-1]
    form = trace[mask]
    if node.target is aten.index_put.default:  # a mask of the first dimensions, not of the last
        form = replace(form, dims=(*form.dims, *[()] * (len(trace[node].dims) - len(form.dims))))
    of = tuple((each, how) for each, how in zip((first, second), hows, strict=True) if not is_zero(each, trace))
    if mask.meta["val"].dtype != torch.bool or not of or not all(is_tensor(each) for each, _ in of):
        return None
    return Choice(of, form)
