"""The pieces of keys: columns that are made alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from ..algebra.operations import piece_of
from ..algebra.sizes import Size, known_at_most, same, total
from ..algebra.substitution import Slice, change_read
from ..algebra.terms import Axis, Dim, Join, Read, Sum, Term, Undefined, Zero
from ..attention.attention import Score
from ..nodes.refusal import Refusal
from ..trace.trace import Trace
from .of_latent import is_of_latent
from .products import gathered, same_tensor
from .readable import is_held
from .scaled import with_scaled_query
from .site import Piece
from .values import Values


def pieces_of(
    node: fx.Node, score: Score, keys: set[Axis], heads: set[Axis], values: Values, trace: Trace, inner: bool = False
) -> Iterator[Piece]:
    """The pieces of a score's contraction.

    A join of columns is yielded piece by piece if some of them differ between heads, a sum term by term if the graph
    holds the terms. If values are `opened`, keys that were put together from plain tensors come piece by piece too,
    except those `inner` to a piece.
    """
    whole = Piece(score.query, score.key, score.summed, score.scale)
    if values.w_uv is None and is_of_latent(whole, keys, values):
        yield whole
        return
    score = with_scaled_query(score, keys, trace)
    join, opened = score.key.parts, values.opened and not inner
    if opened and score.key.joined is not None and score.key.joined.axis in score.summed:
        then = score.key.read.then
        for query, term, axes in _along(score, score.key.joined):
            yield Piece(query, replace(term, read=replace(term.read, then=(*term.read.then, *then))), axes, score.scale)
        return
    if isinstance(join, Zero):
        return
    if isinstance(join, Sum):
        apart = [
            piece
            for term in gathered(join.terms, keys)
            for piece in pieces_of(node, replace(score, key=term), keys, heads, values, trace, inner)
        ]
        held = all(is_held(piece.key.read) or is_of_latent(piece, keys, values) for piece in apart)
        if held or not is_held(score.key.read):
            yield from apart
            return
    shared = heads and not score.key.axes & heads and not opened
    if not isinstance(join, Join) or join.axis not in score.summed or shared:
        yield Piece(score.query, score.key, score.summed, score.scale)
        return
    for query, term, axes in _along(score, join):
        if isinstance(term.parts, Undefined):
            raise Refusal(
                node,
                "expected keys all of whose columns are written, found some that never are",
                "write all columns of the keys",
            )
        yield from pieces_of(node, Score(query, term, axes, score.scale), keys, heads, values, trace, inner=True)


def _along(score: Score, join: Join) -> Iterator[tuple[Term, Term, Dim]]:
    """The query, the key and the summed axes of each piece of a join of keys."""
    start: Size = 0
    for segment in join.segments:
        summed = tuple(a for axis in score.summed for a in (segment.axes if axis is join.axis else (axis,)))
        yield piece_of(score.query, join.axis, start, segment.axes), segment.term, summed
        start = start + segment.size


def around(piece: Piece, latent: Read, rank: Dim) -> Iterator[Piece]:
    """A piece of the keys, in up to three parts if a contiguous range of its columns is the latent."""
    start = _first_column(piece, latent, rank)
    if start is None:
        yield piece
        return
    ((column,), (own,)) = piece.summed, rank
    begin: Size = 0
    for size in (start, own.size, total([column.size, -own.size, -1 * start])):
        if not same(size, 0):
            axes = () if same(size, 1) else (Axis(size),)
            query, key = (piece_of(term, column, begin, axes) for term in (piece.query, piece.key))
            yield replace(piece, query=query, key=key, summed=axes)
        begin = total([begin, size])


def _first_column(piece: Piece, latent: Read, rank: Dim) -> Size | None:
    """Where the latent's columns begin in a piece of the keys that is wider than the latent; None if it has none."""
    if len(piece.summed) != 1 or len(rank) != 1 or same(piece.width, rank[0].size):
        return None
    ((column,), (own,)) = piece.summed, rank
    places = [
        [d.start for d in digits if d.axis is axis]
        for read, axis in ((piece.key.read, column), (latent, own))
        for digits in read.dims
        if any(d.axis is axis for d in digits)
    ]
    if [len(found) for found in places] != [1, 1]:
        return None
    start = total([places[1][0], -1 * places[0][0]])
    if not known_at_most(0, start) or not known_at_most(total([start, own.size]), column.size):
        return None
    part = change_read(piece.key.read, {column: Slice(own, start)})
    return start if same_tensor(part, latent) else None
