"""Whether a piece of the keys comes from the latent of the values."""

from __future__ import annotations

from ..algebra.operations import alike
from ..algebra.substitution import change_read
from ..algebra.terms import Axis, Dim, Term
from .products import UpProjection, same_tensor, up_projection
from .site import Piece
from .values import Values


def is_of_latent(piece: Piece, keys: set[Axis], values: Values) -> bool:
    """Whether a piece of the keys comes from the latent of the values, up-projected or as it is."""
    latent, rank = values.latent, values.rank
    return up_projected(piece, keys, latent, rank) is not None or absorbed(piece, latent, rank)


def up_projected(piece: Piece, keys: set[Axis], latent: Term, rank: Dim) -> UpProjection | None:
    """A piece of the keys as an up-projection of the latent of the values, if it is one."""
    factors = up_projection(piece.key, keys)
    if factors is None or not alike(factors.rank, rank):
        return None
    own = change_read(latent.read, dict(zip(rank, factors.rank, strict=True)))
    return factors if same_tensor(own, factors.latent.read) else None


def absorbed(piece: Piece, value: Term, columns: Dim) -> bool:
    """Whether a piece of the keys is the value itself: attention in latent space, absorbed by hand."""
    if not alike(piece.summed, columns):
        return False
    return same_tensor(change_read(value.read, dict(zip(columns, piece.summed, strict=True))), piece.key.read)
