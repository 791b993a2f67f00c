"""What the values of an attention may be: an up-projection of a latent, or a latent themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..algebra.terms import Axis, Dim, Join, Read, Sum, Term
from ..attention.attention import Attention
from .products import gathered, up_projection


@dataclass(frozen=True)
class Values:
    """Values as an up-projection `w_uv` of a latent, or as the latent itself, whose columns are then `rank`.

    `opened`: keys that were put together from several tensors are read as these tensors.
    """

    latent: Term
    rank: Dim
    w_uv: Read | None
    scale: float = 1.0
    biases: tuple[Read, ...] = ()
    opened: bool = False
    made: Term | None = None
    """The product that the up-projection is, without biases."""


def readings(attention: Attention) -> Iterator[Values]:
    """What the values may be, best first."""
    keys = set(attention.keys)
    varying, biases = _apart(attention.value, keys)
    factors = up_projection(varying, keys)
    as_they_are = Values(attention.value, attention.columns, None)
    found = [as_they_are]
    if factors is not None and factors.latent.axes.isdisjoint(attention.columns):
        found.insert(0, Values(factors.latent, factors.rank, factors.weight, factors.scale, biases, made=varying))
    yield from found
    if any(score.key.joined is not None or isinstance(score.key.parts, Join) for score in attention.scores):
        yield from (replace(values, opened=True) for values in found)


def _apart(value: Term, keys: set[Axis]) -> tuple[Term, tuple[Read, ...]]:
    """Values as the one term that differs between keys, and what is added to it alike for all keys."""
    if isinstance(value.parts, Sum):
        varying = gathered([term for term in value.parts.terms if term.axes & keys], keys)
        if len(varying) == 1:
            return varying[0], tuple(term.read for term in value.parts.terms if term.axes.isdisjoint(keys))
    return value, ()
