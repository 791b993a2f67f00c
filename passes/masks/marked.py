"""Keys that a bool tensor marks: padding, if it has one mark for each key of each sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..algebra.terms import Read
from ..mla.site import Site
from .kind import Kind
from .pairs import Pairs
from .positions import Element, Literal


@dataclass(frozen=True)
class Marked(Kind):
    """A query attends to the keys for which `element` holds."""

    element: Element
    words: tuple[str, ...] = field(default=("tensor",), compare=False)
    origin: tuple[Kind, ...] = field(default=(), compare=False)
    at_hand = True
    pair_by_pair = True

    @property
    def reads(self) -> tuple[Read, ...]:
        return (self.element.read,)

    def tensor(self, pairs: Pairs) -> Tensor:
        marks = pairs(self.element.read)
        return ~marks if self.element.inverted else marks


def recognise(literal: Literal, site: Site, origin: tuple[Kind, ...]) -> Kind | None:
    """The marks that a literal states, if it states any."""
    if not isinstance(literal, Element):
        return None
    key, axes = site.attention.keys[0], literal.read.axes
    padding = key in axes and axes <= {*site.batch, key}
    return Marked(literal, ("padding" if padding else "tensor",), origin)
