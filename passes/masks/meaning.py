"""What masks mean: which pairs of a query and a key they let meet, as algebra on positions.

    k <= q + s                  causal with an offset     comparisons of arange and cumsum, triu, tril
    k < length[b]               lengths
    k > q + s - w               a sliding window
    seen[b, k]                  padding
    k in indices[b, q, :]       top-k                     scatter of a constant into a constant

A mask that is a conjunction of these is known. One that is added is, where it adds 0 to the pairs that it lets meet
and a number that leaves nothing of a score to all others. Whatever is in doubt stays some tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy

from ..algebra.sizes import Size, total
from ..algebra.terms import Axis
from ..attention.scores import Mask, highest_fill
from ..mla.site import Site
from ..trace.trace import Trace
from .positions import Affine, AtMost, Choice, Element, Literal, Named, Truth, conjunction, negation
from .valuation import Valuation

_ALL_ALIKE = -1e30
"""Added to any score this leaves the number itself: its neighbours are 7e22 apart in float32, 1e14 in float64."""


@dataclass(frozen=True)
class Meaning:
    """Which keys each query of a site attends to: those for which every part holds."""

    causal_offset: Size | None = None
    """Query i attends to keys j <= i + causal_offset."""
    limits: tuple[AtMost, ...] = ()
    """Inequalities of positions."""
    elements: tuple[Element, ...] = ()
    """Elements of bool tensors."""
    named: tuple[Named, ...] = ()
    """Keys that tensors of indices name."""
    tensors: tuple[Mask, ...] = ()
    """Masks of which no more is known, in the order in which they apply."""
    uniform_when_empty: bool = False
    """Whether a query that sees no key attends to all of them alike: what hides the keys is one finite number."""
    words: str = "none"
    """For a report: `none`, or `causal`, `lengths`, `window`, `padding`, `top-k` and `tensor`, joined by ` + `."""


def understand(site: Site, trace: Trace) -> Meaning:
    """What the masks of a site mean."""
    attention = site.attention
    unknown = Meaning(
        0 if attention.causal else None,
        tensors=attention.masks,
        words=" + ".join(["causal"] * attention.causal + ["tensor"] * bool(attention.masks)) or "none",
    )
    if len(attention.keys) != 1 or len(site.tokens) > 1:
        return unknown
    places = _Places(site)
    valuation = Valuation(trace)
    rejections = [(mask, _attends(mask, valuation, highest_fill(site.node))) for mask in attention.masks]
    tensors = tuple(mask for mask, found in rejections if found is None)
    known = [found for _, found in rejections if found is not None]
    fills = {fill for _, fill in known}
    truth = conjunction([truth for truth, _ in known])
    if truth is None or truth.negated:
        return unknown
    literals = [*truth.literals, *([AtMost(places.after_query)] if attention.causal else [])]
    literals = [literal for literal in dict.fromkeys(literals) if not places.always(literal)]
    meaning = places.sort(literals, tensors)
    if meaning is None:
        return unknown
    replacing = all(mask.attends for mask in attention.masks)
    if tensors:
        # A finite number that takes a score's place takes also that of one that was hidden before.
        lasting = all(not mask.attends or math.isinf(mask.fill) for mask in tensors)
        return meaning if lasting and all(map(math.isinf, fills)) else unknown
    if all(map(math.isinf, fills)) or places.all_see_some(literals):
        return meaning
    (fill, *others) = fills
    if not others and not attention.causal and (replacing or (len(known) == 1 and fill <= _ALL_ALIKE)):
        return replace(meaning, uniform_when_empty=True)
    return replace(unknown, words=meaning.words)


def _attends(mask: Mask, valuation: Valuation, highest: float) -> tuple[Truth, float] | None:
    """Where a mask lets a query attend, and what it makes of scores or adds to them elsewhere."""
    value = valuation.of_read(mask.term.read)
    if mask.attends:
        if not isinstance(value, Truth):
            return None
        return (negation(value) if mask.inverted else value), mask.fill
    if not isinstance(value, Choice):
        return None
    then, otherwise = value.then * mask.factor, value.otherwise * mask.factor
    if then == 0 and otherwise <= highest:
        return value.condition, otherwise
    return (negation(value.condition), then) if otherwise == 0 and then <= highest else None


_WORDS = ("causal", "lengths", "window", "padding", "top-k", "tensor")


class _Places:
    """Positions of the keys and the queries of a site: what an inequality of them says."""

    def __init__(self, site: Site) -> None:
        self.key: Axis = site.attention.keys[0]
        self.query: Axis | None = site.tokens[0] if site.tokens else None
        self.batch = frozenset(site.batch)

    @property
    def after_query(self) -> Affine:
        """How far a key is behind its query, both counted from 0."""
        here = Affine(0, ((self.query, 1),)) if self.query is not None else Affine()
        return Affine(0, ((self.key, 1),)) - here

    def always(self, literal: Literal) -> bool:
        return isinstance(literal, AtMost) and _never_positive(literal.what)

    def all_see_some(self, literals: Sequence[Literal]) -> bool:
        """Whether every query provably sees the first key, or the last one that a causal limit leaves it."""
        if not all(isinstance(literal, AtMost) for literal in literals):
            return False
        inequalities = [literal.what for literal in literals if isinstance(literal, AtMost)]
        last = [Affine(0, ((self.key, 1),)) - what for what in inequalities if what.factor(self.key) == 1]
        for candidate in (Affine(), *last):
            there = Affine(0, ((self.key, 1),)) - candidate
            exists = _never_positive(candidate * -1) and _never_positive(candidate - Affine(total([self.key.size, -1])))
            if exists and all(_never_positive(what - there * what.factor(self.key)) for what in inequalities):
                return True
        return False

    def sort(self, literals: Sequence[Literal], tensors: tuple[Mask, ...]) -> Meaning | None:
        """The literals by their kind; None where one speaks of more than keys, queries and sequences."""
        offset: Size | None = None
        kinds: list[str] = []
        limits: list[AtMost] = []
        for literal in literals:
            if isinstance(literal, AtMost):
                if any(isinstance(w, Axis) and w not in (self.key, self.query) for w, _ in literal.what.terms):
                    return None
                kinds.append(self._kind(literal.what))
                own = self._offset(literal.what)
                if own is not None and (offset is None or _at_most(own, offset)):
                    offset = own
                elif own is None or not (offset is not None and _at_most(offset, own)):
                    limits.append(literal)
            elif isinstance(literal, Element):
                padding = self.key in literal.read.axes and literal.read.axes <= self.batch | {self.key}
                kinds.append("padding" if padding else "tensor")
            else:
                kinds.append("tensor" if literal.inverted else "top-k")
        if tensors:
            kinds.append("tensor")
        return Meaning(
            offset,
            tuple(limits),
            tuple(literal for literal in literals if isinstance(literal, Element)),
            tuple(literal for literal in literals if isinstance(literal, Named)),
            tensors,
            words=" + ".join(word for word in _WORDS if word in kinds) or "none",
        )

    def _kind(self, what: Affine) -> str:
        by_query = self.query in what.axes if self.query is not None else len(what.terms) == 1
        match what.factor(self.key):
            case 1:
                return "causal" if by_query else "lengths"
            case -1:
                return "window"
        return "tensor"

    def _offset(self, what: Affine) -> Size | None:
        """`s` of `k <= q + s`"""
        rest = what - self.after_query
        return None if rest.terms else _minus(rest.const)


def _minus(size: Size) -> Size:
    return total([0, -1 * size])


def _at_most(a: Size, b: Size) -> bool:
    return _never_positive(Affine(total([a, _minus(b)])))


def _never_positive(what: Affine) -> bool:
    """Whether a value is at most 0 at all indices of its axes."""
    most = what.const
    for axis, factor in what.terms:
        if not isinstance(axis, Axis):
            return False
        if factor > 0:
            most = most + factor * (axis.size - 1)
    return bool(sympy.expand(sympy.sympify(most)).is_nonpositive)
