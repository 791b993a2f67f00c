"""All that is recognised in masks: what operations say about positions, and the kinds of what they say."""

from __future__ import annotations

from collections.abc import Callable

from ..mla.own_ropes import OF_HEADS, OF_QUERIES
from ..mla.site import Site
from . import causal, limit, marked, top_k
from .kind import Kind
from .positions import Literal
from .rules import arithmetic, choices, constants, joins, logic
from .rules.rule import Rules

RULES = Rules(constants.RULES | arithmetic.RULES | logic.RULES | choices.RULES | joins.RULES)
"""All rules. No op is in two tables."""

RECOGNISERS: tuple[Callable[[Literal, Site, tuple[Kind, ...]], Kind | None], ...] = (
    causal.recognise,
    limit.recognise,
    marked.recognise,
    top_k.recognise,
)
"""Each gives the kind of a literal that it recognises, with the masks that the literal comes from as its origin.
The first kind is taken."""

WORDS = ("sequences", "causal", "lengths", "window", "padding", "top-k", OF_HEADS, OF_QUERIES, "tensor")
"""The order of words in a report; all others come after these."""


def recognise(literal: Literal, site: Site, origin: tuple[Kind, ...]) -> Kind | None:
    """The kind of a literal that comes from the masks `origin`; None if nothing recognises it."""
    found = (recogniser(literal, site, origin) for recogniser in RECOGNISERS)
    return next((kind for kind in found if kind is not None), None)
