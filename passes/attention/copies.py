"""Find what a tensor is a copy of: the same elements in the same places, perhaps in another dtype or scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from ..nodes.arguments import is_tensor
from ..trace.trace import Trace


@dataclass(frozen=True)
class Original:
    """The tensor that another is a copy of, and the numbers that the copy was multiplied by, in order."""

    node: fx.Node
    factors: tuple[float, ...]


def original_of(node: fx.Node, trace: Trace) -> Original | None:
    """The original of a tensor, itself if it is no copy; None if it is put together from several, or reads a part."""
    form = trace[node]
    read = form.term.read
    if not isinstance(read.source, fx.Node) or len(read.dims) != len(form.dims):
        return None
    for digits, axes in zip(read.dims, form.dims, strict=True):
        if tuple(digit.axis for digit in digits) != axes or not all(digit.whole for digit in digits):
            return None
    return Original(read.source, read.factors)


def copied(node: Any, trace: Trace) -> fx.Node | None:
    """The tensor that `node` is a copy of, perhaps in another dtype; None if there is none or it was multiplied."""
    original = original_of(node, trace) if is_tensor(node) else None
    return None if original is None or original.factors or not is_tensor(original.node) else original.node
