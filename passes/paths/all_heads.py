"""Find the site of all heads, where a rank takes its own heads from tensors that hold those of all ranks.

    W_UK[n, p, l] = kv_b[rank * N + n, p, l]        of `kv_b` with `ranks * N` heads

Heads lie rank after rank: outputs are sent back in that order, and this rank's part of it is what is proved here.
"""

from __future__ import annotations

from dataclasses import replace

from ..algebra.sizes import Size, product, same
from ..algebra.terms import Axis, Digit, Read, Term
from ..mla.site import Piece, Site


def with_all_heads(site: Site, ranks: int, rank: int, *, queries: bool) -> Site | None:
    """A site with the weights of all ranks' heads, and with the `queries` of all, if that is asked for.

    None where a tensor is not provably the `rank`-th part of one of all heads.
    """
    if len(site.heads) != 1:
        return None
    (own,) = site.heads
    whole = Axis(product([ranks, own.size]))

    def widened(read: Read) -> Read | None:
        found = [digit for digit in read.digits if digit.axis is own]
        if len(found) != 1 or found[0].step != 1 or not _is_part(found[0], whole, product([rank, own.size])):
            return None
        dims = (tuple(Digit(whole, whole.size) if digit.axis is own else digit for digit in dim) for dim in read.dims)
        return replace(read, dims=tuple(dims))

    weights = [None if weight is None else widened(weight) for weight in (site.w_uk, site.w_uv)]
    if None in weights and not (queries and weights == [site.w_uk, site.w_uv]):
        return None
    pieces = [site.nope, *site.ropes]
    reads = [widened(piece.query.read) if queries else piece.query.read for piece in pieces]
    if any(read is None for read in reads):
        return None
    nope, *ropes = (_with_query(piece, read) for piece, read in zip(pieces, reads, strict=True) if read is not None)
    return replace(site, heads=(whole,), w_uk=weights[0], w_uv=weights[1], nope=nope, ropes=tuple(ropes))


def _is_part(digit: Digit, whole: Axis, start: Size) -> bool:
    bounds = (digit.extent, whole.size), (digit.start, start), (digit.before, 0), (digit.after, 0)
    return all(same(a, b) for a, b in bounds)


def _with_query(piece: Piece, read: Read) -> Piece:
    return replace(piece, query=Term(read))
