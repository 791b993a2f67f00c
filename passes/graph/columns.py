"""Columns of a tensor over tokens: an up-projection of a latent, or the latent itself, which may repeat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..algebra.sizes import Size, product
from ..algebra.substitution import change_read
from ..algebra.terms import Axis, Dim, Read, Segment, Sum
from ..code.reading import Reader, write_as
from ..mla.products import up_projection
from ..mla.readable import is_held, unbroadcast


@dataclass(frozen=True)
class Piece:
    """Columns `along`: `scale * sum over rank of latent * weight + biases`. Without a weight, they are the latent
    itself, over `same`, and repeated along all other axes."""

    along: Dim
    latent: Read
    rank: Dim
    weight: Read | None = None
    same: Dim = ()
    scale: float = 1.0
    biases: tuple[Read, ...] = ()

    @property
    def reads(self) -> tuple[Read, ...]:
        return self.latent, *((self.weight,) if self.weight is not None else ()), *self.biases

    @property
    def repeats(self) -> bool:
        """Whether columns are the same along some axes."""
        return self.weight is None and len(self.same) < len(self.along)

    @property
    def width(self) -> Size:
        return product(axis.size for axis in self.rank)

    def matrix(self, read: Reader, latent: Tensor) -> Tensor:
        """`[rank, columns]`: what a `latent [..., rank]` is multiplied by."""
        if self.weight is not None:
            return read(self.weight, self.rank, self.along) * self.scale
        identity = torch.eye(latent.shape[-1], dtype=latent.dtype, device=latent.device)
        return write_as(identity, (self.rank, self.same), (self.rank, self.along), read.realize)

    def bias(self, read: Reader, like: Tensor) -> Tensor:
        """`[columns]`: what is added to the product; no tensor that is known to be zeros, which as a piece of a sum
        would take the product apart at the seam."""
        nothing = like.new_zeros([read.realize(product(axis.size for axis in self.along))]) + 0.0
        return sum((read(bias, self.along) for bias in self.biases), nothing)


def up_projected(segment: Segment, tokens: set[Axis]) -> Piece | None:
    """A segment of joined columns as an up-projection; None if it is none."""
    term, own = segment.term, {*segment.axes}
    terms = term.parts.terms if isinstance(term.parts, Sum) else (term,)
    products = [up for addend in terms if (up := up_projection(addend, tokens)) is not None]
    biases = tuple(addend.read for addend in terms if addend.axes.isdisjoint(tokens))
    if len(products) != 1 or len(biases) != len(terms) - 1:
        return None
    (up,) = products
    if not up.latent.axes.isdisjoint(own) or not up.weight.axes <= own | {*up.rank}:
        return None
    piece = Piece(segment.axes, up.latent.read, up.rank, up.weight, (), up.scale, biases)
    return piece if all(map(is_held, piece.reads)) else None


def as_it_is(segment: Segment) -> Piece | None:
    """A segment of joined columns as a tensor that repeats along them, or not at all; None if it is none."""
    read = unbroadcast(segment.term).read
    ranks = {axis: Axis(axis.size) for axis in segment.axes if axis in read.axes}
    if not ranks or not is_held(read):
        return None
    return Piece(segment.axes, change_read(read, ranks), tuple(ranks.values()), None, tuple(ranks))
