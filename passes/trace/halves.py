"""Pages whose bytes hold two numbers of 4 bits each: the code that takes them apart, and gives them their signs.

    lower, upper = bytes & 15, bytes >> 4        a number from 0 to 15 each
    numbers = stack([lower, upper], -1)          one behind the other, the lower half of each byte first
    numbers.to(int8) - 8                         from -8 to 7, in a dtype that holds them

The last is a tensor in INT4, from which `coded` goes on: it is widened and multiplied by scales. In between the
element is a lookup too, of halves (`Half`) or of numbers without signs (`Bits` of uint4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mla_compile.int4 import BIAS, INT4, PACKED, UINT4

from ..algebra.gathers import lookup_of, together
from ..algebra.operations import align, read_of
from ..algebra.substitution import change_read
from ..algebra.terms import Axis, Bits, Digit, Form, Half, Lookup, Read
from ..nodes.arguments import argument, arguments, aten, is_tensor
from .coded import WIDE, dtype_of
from .handler import Forms, Handlers, pointwise

HANDLERS = Handlers()
_UNSIGNED = Bits(UINT4)
_SIGNED = torch.int8, torch.int16, torch.int32, torch.int64
"""The integers that hold every number of INT4."""
_TAKES: dict[Any, Half] = {
    (aten.bitwise_and.Scalar, 15): Half(upper=False),
    (aten.__rshift__.Scalar, 4): Half(upper=True),
    (aten.bitwise_right_shift.Tensor_Scalar, 4): Half(upper=True),
}


@HANDLERS.of(*{op for op, _ in _TAKES})
def _half(trace: Forms, node: fx.Node) -> Form:
    source, number = arguments(node)[:2]
    half = _TAKES.get((node.target, number)) if isinstance(number, int) else None
    lookup = lookup_of(trace[source].term)
    if half is None or lookup is None or not _is_plain(lookup) or source.meta["val"].dtype != PACKED:
        return pointwise(trace, node)
    return _leaf(node, trace[source], lookup, replace(lookup.pages, then=(half,)))


def _is_plain(lookup: Lookup) -> bool:
    """Whether a lookup gives whole rows of a tensor as it is."""
    pages = lookup.pages
    return not lookup.then and lookup.scales is None and not pages.then and all(d.whole for d in pages.dims[-1])


def of_whole_bytes(node: fx.Node, pieces: Sequence[Form], dim: int) -> Form | None:
    """The form of both halves of bytes, the lower one first, joined along the last dimension; None for other pieces."""
    last = len(pieces[0].dims) - 1
    if len(pieces) != 2 or dim != last or any(piece.dims[last] for piece in pieces):
        return None
    (lower, upper), _ = align(pieces, [range(last + 1)] * 2)
    of_lower, of_upper = lookup_of(lower.term), lookup_of(upper.term)
    if of_lower is None or of_upper is None or of_lower.then or of_upper.then:
        return None
    changes = together(of_lower, of_upper)
    if of_lower.pages.then != (Half(upper=False),) or of_upper.pages.then != (Half(upper=True),) or changes is None:
        return None
    pages = replace(of_lower.pages, then=())
    if replace(change_read(of_upper.pages, changes), then=()) != pages:
        return None
    both = Axis(2)
    dims = (*pages.dims[:-1], (*pages.dims[-1], Digit(both, 2)))
    return _leaf(node, Form((*lower.dims[:-1], (both,)), lower.term), of_lower, Read(pages.source, dims, (_UNSIGNED,)))


def with_signs(trace: Forms, node: fx.Node) -> Form | None:
    """The form of numbers from 0 to 15 less 8; None for any other difference."""
    number, by = arguments(node)[:2]
    less = BIAS if node.target in (aten.sub.Tensor, aten.sub.Scalar) else -BIAS
    if (
        node.target in (aten.rsub.Tensor, aten.rsub.Scalar)
        or by != less
        or isinstance(by, bool | fx.Node)
        or argument(node, "alpha") != 1
    ):
        return None
    lookup = lookup_of(trace[number].term) if is_tensor(number) else None
    if lookup is None or lookup.pages.then != (_UNSIGNED,) or lookup.scales is not None:
        return None
    if node.meta["val"].dtype not in (*_SIGNED, *WIDE) or not all(step in WIDE for step in lookup.then):
        return None
    return _leaf(node, trace[number], lookup, replace(lookup.pages, then=(Bits(INT4),)))


def kept_by_cast(trace: Forms, node: fx.Node) -> Form | None:
    """The form of a cast to integers that keeps numbers of 4 bits as they are; None for any other."""
    form, dtype = trace[arguments(node)[0]], node.meta["val"].dtype
    lookup = lookup_of(form.term)
    if lookup is None or lookup.then or dtype not in _SIGNED or dtype_of(lookup.pages) not in (UINT4, INT4):
        return None
    return _leaf(node, form, lookup, lookup.pages)


def kept_by_view(trace: Forms, node: fx.Node) -> Form | None:
    """The form of a view of numbers from 0 to 15 as int8, in which they are the same bits; None for any other view."""
    source, dtype = arguments(node)
    lookup = lookup_of(trace[source].term)
    unsigned = lookup is not None and not lookup.then and lookup.pages.then == (_UNSIGNED,)
    if lookup is None or not unsigned or source.meta["val"].dtype != PACKED or dtype != torch.int8:
        return None
    return _leaf(node, trace[source], lookup, lookup.pages)


def are_taken_apart(lookup: Lookup) -> bool:
    """Whether what is looked up is numbers of 4 bits, or halves of bytes."""
    then = lookup.pages.then
    return dtype_of(lookup.pages) in (UINT4, INT4) or any(isinstance(step, Half) for step in then)


def _leaf(node: fx.Node, form: Form, lookup: Lookup, pages: Read) -> Form:
    """`node`, over the axes of a form, as a leaf that looks up `pages`."""
    return Form(form.dims, replace(read_of(node, form.dims), stored=replace(lookup, pages=pages)))
