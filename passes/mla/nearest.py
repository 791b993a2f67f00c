"""Read rope queries from the tensors that were joined to make the queries.

transformers joins both parts of a query, and the absorbed paths read the first part from before the join. If the second
part is read from before it too, nothing reads the join any more, and it need not be computed.

    before  q = cat([q_nope, q_rope], -1), read at P:      after  q_rope
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ..algebra.sizes import known_at_most, same, total
from ..algebra.terms import Read
from ..nodes.arguments import argument, arguments, aten
from ..nodes.shapes import shape_of
from .site import Site


def with_nearest_queries(site: Site) -> Site:
    """The same site, whose rope queries are read from a piece of a join where one holds all of them."""
    ropes = (replace(rope, query=replace(rope.query, read=nearest(rope.query.read))) for rope in site.ropes)
    return replace(site, ropes=tuple(ropes))


def nearest(read: Read) -> Read:
    """The same elements, read from the one tensor of a join that has them all, if there is one."""
    while (piece := _in_piece(read)) is not None:
        read = piece
    return read


def _in_piece(read: Read) -> Read | None:
    source = read.source
    if not isinstance(source, fx.Node) or source.target is not aten.cat.default:
        return None
    dim = argument(source, "dim") % len(shape_of(source))
    if len(read.dims[dim]) != 1:
        return None
    (digit,) = read.dims[dim]
    if digit.axis is None or digit.step != 1 or not (same(digit.before, 0) and same(digit.after, 0)):
        return None
    stop, begin = total([digit.start, digit.axis.size]), total([])
    for piece in arguments(source)[0]:
        if len(shape_of(piece)) != len(shape_of(source)) or piece.meta["val"].dtype != source.meta["val"].dtype:
            return None
        size = shape_of(piece)[dim]
        end = total([begin, size])
        if known_at_most(begin, digit.start) and known_at_most(stop, end):
            own = replace(digit, extent=size, start=total([digit.start, -1 * begin]))
            return replace(read, source=piece, dims=(*read.dims[:dim], (own,), *read.dims[dim + 1 :]))
        begin = end
    return None
