"""An MLA site: which terms are its latent, rope key, up-projections and queries, over the axes of its attention.

Attention that was absorbed by hand (the keys and the values *are* the latent) is a site too, without up-projections. So
is one where only the values are known to be up-projected.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ..algebra.sizes import Size, product, total
from ..algebra.terms import Dim, Read, Term
from ..attention.attention import Attention
from ..nodes.refusal import Refusal
from .kept_columns import KeptColumns


@dataclass(frozen=True)
class Piece:
    """Columns of the scores' contraction: `scale * sum over summed of query * key`."""

    query: Term
    key: Term
    summed: Dim
    scale: float
    of: int = 0
    """The index of the attention's score that it is a piece of."""

    @property
    def width(self) -> Size:
        return product(axis.size for axis in self.summed)

    @property
    def reads(self) -> tuple[Read, Read]:
        """What is multiplied."""
        return self.query.read, self.key.read


@dataclass(frozen=True)
class OwnLatent:
    """Keys that are up-projected from a latent which is not that of the values, as they are before W_UK is absorbed.

    `latent` runs over the batch, the keys and `rank`; `w_uk` over the heads, `nope.summed` and `rank`.
    """

    latent: Term
    rank: Dim
    w_uk: Read
    nope: Piece
    ropes: tuple[Piece, ...]


@dataclass(frozen=True)
class Site:
    """An MLA attention, over the axes of `attention`.

    `latent` runs over `batch, keys, rank`; `w_uk` over `heads, nope.summed, rank`; `w_uv` over
    `heads, attention.columns, rank`. Each weight is None where the user absorbed it by hand, `w_uk` also where keys are
    `apart` or unproved. `biases` run over `batch, tokens, heads, attention.columns`.
    """

    attention: Attention
    batch: Dim
    tokens: Dim
    heads: Dim
    rank: Dim
    latent: Term
    nope: Piece
    ropes: tuple[Piece, ...]
    w_uk: Read | None
    w_uv: Read | None
    biases: tuple[Read, ...] = ()
    """What is added to the values of all keys alike, and so to the output, as weights add up to 1."""
    value_scale: float = 1.0
    """The number by which the values, without biases, are multiplied, and so the output."""
    shifts: tuple[Piece, ...] = ()
    """What the biases of the keys add to all scores of a row. Empty unless it matters: beside sinks, to whose scores it
    is not added, and under a function of the scores."""
    apart: bool = False
    """Whether the latent is the values' alone. All keys are then rope keys, and `nope` is the first of them."""
    of_keys: OwnLatent | None = None
    """The latent of the keys, where it is not that of the values. Unless they are `apart`, `w_uk` runs over its rank
    instead of `rank`."""
    own_ropes: tuple[Piece, ...] = ()
    """Rope keys that each head has for itself, whose products are among the masks of the attention, to be added. See
    `own_ropes.in_keys`."""
    unproved_keys: Refusal | None = None
    """Why keys stay what the graph computes, while values are an up-projection; the scores are then those of
    `attention`, and `nope` is the first summand of them. None where keys are an up-projection too."""
    kept: KeptColumns | None = None
    """If the keys are unproved, what is still read of the product that makes the values; None if nothing is."""
    groups: Groups | None = None
    """Where groups of heads have a latent each: the sites of all groups, of which this is the first."""

    @property
    def node(self) -> fx.Node:
        return self.attention.node

    @property
    def absorbed_by_hand(self) -> bool:
        """Whether neither keys nor values are up-projected: both are the latent, or are made of it by no weight."""
        return self.w_uk is None and self.w_uv is None

    @property
    def up_projects_both(self) -> bool:
        """Whether keys and values are each up-projected, or, where they are `apart`, may be."""
        return self.w_uv is not None and (self.w_uk is not None or self.apart)

    def differs(self, rope: Piece) -> bool:
        """Whether a rope key is not the same for all heads."""
        return not rope.key.axes.isdisjoint(self.heads)

    @property
    def second_latent(self) -> OwnLatent | None:
        """The latent from which keys alone are up-projected; None where there is none, or they are `apart`."""
        return None if self.apart else self.of_keys

    @property
    def key_heads(self) -> Dim:
        """The heads that have up-projected keys of their own; groups of query heads may share one."""
        return tuple(axis for axis in self.heads if self.w_uk is not None and axis in self.w_uk.axes)

    @property
    def value_heads(self) -> Dim:
        """The heads that have values of their own; groups of query heads may share one."""
        return tuple(axis for axis in self.heads if self.w_uv is not None and axis in self.w_uv.axes)

    @property
    def sizes(self) -> dict[str, Size]:
        """The sizes `B, Sq, T, N, L, P, R, V`, in the words of the cost model; `Lk` too, where keys have their own
        latent."""
        own = self.of_keys
        nope, ropes = (self.nope, self.ropes) if own is None else (own.nope, own.ropes)
        dims = {
            "B": self.batch,
            "Sq": self.tokens,
            "T": self.attention.keys,
            "N": self.heads,
            "L": self.rank,
            "P": nope.summed,
            "V": self.attention.columns,
        }
        sizes = {name: product(axis.size for axis in dim) for name, dim in dims.items()}
        sizes["R"] = total(piece.width for piece in (*ropes, *self.own_ropes))
        if own is not None:
            sizes["Lk"] = product(axis.size for axis in own.rank)
        elif self.apart:
            sizes["P"] = 0
        return sizes


@dataclass(frozen=True)
class Groups:
    """The `sites` of an attention, one for every index of `axes`, which are some of its rows."""

    attention: Attention
    axes: Dim
    sites: tuple[Site, ...]
