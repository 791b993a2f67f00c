"""Make one piece of several that have the same key, as where each head adds a bias of its own to the queries.

q . k + u . k   =   (q + u) . k
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ..algebra.made import added
from ..algebra.operations import alike
from ..algebra.substitution import change_read
from ..algebra.terms import Term
from ..attention.attention import Attention
from ..attention.outer import in_own_dtype
from .computed import computed
from .products import same_tensor, times
from .readable import is_held
from .site import Piece


def with_summed_queries(attention: Attention, pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces of the keys, with those of the same key made one, unless a function of the scores stands between
    them."""
    found: list[Piece] = []
    for piece in pieces:
        for i, earlier in enumerate(found):
            apart = attention.opaque is not None and earlier.of != piece.of
            both = None if apart else _both(computed(earlier), computed(piece))
            if both is not None:
                found[i] = both
                break
        else:
            found.append(piece)
    return found


def _both(a: Piece, b: Piece) -> Piece | None:
    """Two pieces as one; None if they have other keys, or the graph does not hold all that is read."""
    if not alike(a.summed, b.summed) or a.scale == 0 or not math.isfinite(b.scale / a.scale):
        return None
    own = dict(zip(b.summed, a.summed, strict=True))
    if not is_held(a.key.read) or not same_tensor(change_read(b.key.read, own), a.key.read):
        return None
    if not (is_held(a.query.read) and is_held(b.query.read)):
        return None
    query = added([a.query.read, times(change_read(b.query.read, own), b.scale / a.scale)])
    return replace(a, query=Term(in_own_dtype(query, a.query.read)))
