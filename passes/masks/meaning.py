"""What masks mean: which pairs of a query and a key they allow, as a list of kinds.

    k <= q + s                  causal with an offset     comparisons of arange and cumsum, triu, tril
    k < length[b]               lengths
    k > q + s - w               a sliding window
    seen[b, k]                  padding
    k in indices[b, q, :]       top-k                     scatter of a constant into a constant
    one of these up to T1, another from there on          cat of masks, one of which is top-k

A mask that is a conjunction of these is known. A mask that is added is known if it adds 0 to the pairs that it
allows, and to all others a number that leaves nothing of a score. Whatever is in doubt stays an arbitrary tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..algebra.sizes import known_at_most, total
from ..algebra.terms import Join
from ..attention.scores import ALL_ALIKE, highest_fill
from ..attention.summands import Mask
from ..mla.site import Site
from ..trace.trace import Trace
from .causal import Causal, after_query
from .joined import JoinedMask, joined, part_of
from .kind import Kind
from .kinds import RULES, WORDS, recognise
from .positions import ALWAYS, Affine, AtMost, Conditional, Literal, Named, Truth, conjunction, negation
from .sequences import Sequences
from .tensor import tensor_mask
from .valuation import Valuation


@dataclass(frozen=True)
class Meaning:
    """Which keys each query of a site attends to: those that no kind hides."""

    kinds: tuple[Kind, ...] = ()
    """Kinds that add to scores, or replace them by a number, are in the order in which they apply."""
    fill: float = -math.inf
    """What hidden scores become."""

    @property
    def uniform_when_empty(self) -> bool:
        """Whether a query that sees no key attends to all keys alike, since what hides them is one finite number."""
        return not math.isinf(self.fill)

    @property
    def words(self) -> str:
        """For a report: `none`, or the words of the kinds, joined by ` + `."""
        words = {word for kind in self.kinds for word in kind.words}
        known = [word for word in WORDS if word in words]
        return " + ".join([*known, *sorted(words.difference(known))]) or "none"


def understand(site: Site, trace: Trace) -> Meaning:
    """What the masks of a site mean."""
    attention = site.attention
    if attention.packed is not None:
        return Meaning((Sequences(attention.packed),))
    flag = (Causal(0),) if attention.causal else ()
    masks = tuple(map(tensor_mask, attention.masks))
    unknown = Meaning((*flag, *masks))
    if len(attention.keys) != 1 or len(site.tokens) > 1:
        return unknown
    valuation = Valuation(trace, RULES)
    if (of_parts := _joined(site, valuation)) is not None:
        return Meaning((of_parts,))
    rejections = [(mask, _attends(mask, valuation, highest_fill(site.node))) for mask in attention.masks]
    tensors = [mask for mask, found in rejections if found is None]
    known = [found for _, found in rejections if found is not None]
    fills = {fill for _, fill in known}
    truth = conjunction([truth for truth, _ in known])
    if truth is None or truth.negated:
        return unknown
    literals = [literal for literal in truth.literals if not literal.holds_always]
    found = [recognise(literal, site, masks) for literal in literals]
    kinds = [kind for kind in found if kind is not None]
    if len(kinds) < len(found):
        return unknown
    meaning = Meaning((*map(tensor_mask, tensors), *_without_implied([*kinds, *flag])))
    replacing = all(mask.attends for mask in attention.masks)
    if tensors:
        # A finite number that replaces a score also replaces one that was hidden before.
        lasting = all(not mask.attends or math.isinf(mask.fill) for mask in tensors)
        return meaning if lasting and all(map(math.isinf, fills)) else unknown
    limits = [*literals, AtMost(after_query(site))] if attention.causal else literals
    if all(map(math.isinf, fills)) or _all_see_some(limits, site):
        return meaning
    (fill, *others) = fills
    if not others and not attention.causal and (replacing or (len(known) == 1 and fill <= ALL_ALIKE)):
        return replace(meaning, fill=fill)
    words = tuple(word for kind in meaning.kinds for word in kind.words)
    return Meaning((*flag, *(replace(mask, words=words) for mask in masks)))


def _attends(mask: Mask, valuation: Valuation, highest: float) -> tuple[Truth, float] | None:
    """Where a mask lets a query attend, and the number that replaces scores elsewhere, or is added to them; None if
    unknown."""
    value = valuation.of_read(mask.term.read)
    if mask.attends:
        if not isinstance(value, Truth):
            return None
        return (negation(value) if mask.inverted else value), mask.held(mask.fill)
    if not isinstance(value, Conditional):
        return None
    then, otherwise = (mask.held(number * mask.factor) for number in (value.then, value.otherwise))
    if then == otherwise == 0:
        return ALWAYS, -math.inf
    if then == 0:
        condition, hidden = value.condition, otherwise
    elif otherwise == 0:
        condition, hidden = negation(value.condition), then
    else:
        return None
    if mask.highest is not None and highest < hidden <= mask.highest:
        hidden = ALL_ALIKE  # it leaves nothing of a score in the graph's dtype, but something in that of the ops
    return (condition, hidden) if hidden <= highest else None


def _joined(site: Site, valuation: Valuation) -> JoinedMask | None:
    """The only mask of a site as masks of parts of its keys, if one of these names keys and nothing is left of hidden
    scores."""
    attention = site.attention
    if len(attention.masks) != 1 or attention.causal:
        return None
    (mask,) = attention.masks
    join = mask.term.parts if mask.term.parts is not None or mask.term.read.then else mask.term.joined
    if not isinstance(join, Join) or join.axis is not attention.keys[0]:
        return None
    segments, fills, all_see_some = [], [], False
    for segment in join.segments:
        found = _attends(replace(mask, term=segment.term), valuation, highest_fill(site.node))
        truth = conjunction([found[0]]) if found is not None else None
        if found is None or truth is None or truth.negated or len(segment.axes) != 1:
            return None
        part = part_of(site, segment.axes[0])
        literals = [literal for literal in truth.literals if not literal.holds_always]
        kinds = [kind for literal in literals if (kind := recognise(literal, part, ())) is not None]
        if len(kinds) < len(literals):
            return None
        segments.append((part, kinds))
        fills.append(found[1])
        all_see_some = all_see_some or _all_see_some(literals, part)
    # Sinks take all the weight of a query that sees no key, whatever its scores were hidden by.
    vanish = all(map(math.isinf, fills)) or all_see_some or attention.shared
    return joined(mask, segments) if vanish else None


def _without_implied(kinds: Sequence[Kind]) -> list[Kind]:
    """The kinds, without those that another one implies."""
    kept: list[Kind] = []
    for kind in kinds:
        if not any(other.implies(kind) for other in kept):
            kept = [*(other for other in kept if not kind.implies(other)), kind]
    return kept


def _all_see_some(literals: Sequence[Literal], site: Site) -> bool:
    """Whether every query provably sees some key: the first, the last, the last one that an upper limit leaves it, or
    one that is named, if names are all that there is."""
    axis = site.attention.keys[0]
    match literals:
        case [Named() as names]:
            some = known_at_most(1, names.named.size) and known_at_most(names.extent, axis.size)
            return some and names.key == axis and not names.inverted
    key = Affine(0, ((axis, 1),))
    inequalities = [literal.what for literal in literals if isinstance(literal, AtMost)]
    if len(inequalities) < len(literals):
        return False
    last = [key - what for what in inequalities if what.factor(axis) == 1]
    for candidate in (Affine(), Affine(total([axis.size, -1])), *last):
        there = key - candidate
        exists = (candidate * -1).never_positive and (candidate - Affine(total([axis.size, -1]))).never_positive
        if exists and all((what - there * what.factor(axis)).never_positive for what in inequalities):
            return True
    return False
