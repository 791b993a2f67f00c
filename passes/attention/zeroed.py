"""Attention weights some of which were set to 0, and what that says about their softmax.

w = softmax(where(seen, s, fill))
nan_to_num(w),  where(isnan(w), 0, w)       a row that sees no key is 0
where(seen, w, 0)                           the same, whatever number replaced the scores
w * seen / (w * seen).sum(-1)               a softmax whose scores are hidden there, also for w = exp(s)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..algebra import operations
from ..algebra.terms import Axis, Digit, Form, Zero
from ..nodes.arguments import NEGATIONS, arguments, aten, is_tensor
from ..nodes.constants import constant_of
from ..nodes.refusal import Refusal
from ..nodes.source import where
from ..trace.trace import Trace
from .copies import copied
from .summands import Mask, Summand


@dataclass(frozen=True)
class Seen:
    """A bool tensor over the last dimensions of weights: True where they are kept, or False if it is `inverted`.

    `multiplied`: the weights were multiplied by it, so NaN stays NaN. `renormed`: the weights that are kept were then
    divided by their sum; `bounded`: or by a greater number where that is 0.
    """

    form: Form
    inverted: bool = False
    multiplied: bool = False
    renormed: bool = False
    bounded: bool = False


@dataclass(frozen=True)
class Zeroed:
    """The weights `of`, some of which were set to 0: those that are not `seen`, or those that are NaN if that is None.

    `between` are the nodes made of the weights that say which ones, and the zeros if they are made of the weights.
    """

    of: fx.Node
    seen: Seen | None = None
    between: tuple[fx.Node, ...] = ()


def zeroed(node: fx.Node, trace: Trace) -> Zeroed | None:
    """What a tensor is, apart from elements that were set to 0; None if none were."""
    match node.target:
        case aten.nan_to_num.default:
            whole, number = (*arguments(node), None)[:2]
            source = copied(whole, trace)
            return Zeroed(source) if source is not None and not number else None
        case aten.masked_fill.Scalar | aten.masked_fill.Tensor:
            whole, mask, number = arguments(node)
            inverted = True
        case aten.where.self:
            mask, whole, number = arguments(node)
            inverted = is_zero(whole, trace)
            whole, number = (number, whole) if inverted else (whole, number)
        case aten.mul.Tensor:
            return _multiplied(node, trace)
        case _:
            return None
    source = copied(whole, trace)
    if source is None or not is_zero(number, trace):
        return None
    between = (number,) if is_tensor(number) and arguments(number)[:1] == (whole,) else ()
    if inverted and (asked := _not_a_number(mask, source, trace)):
        return Zeroed(source, between=(*between, *asked))
    return Zeroed(source, Seen(trace[mask], inverted), between)


def _multiplied(node: fx.Node, trace: Trace) -> Zeroed | None:
    """Weights times a bool tensor."""
    a, b = arguments(node)[:2]
    for whole, by in ((a, b), (b, a)):
        source, form = copied(whole, trace), _bool(by, trace)
        if source is not None and form is not None:
            return Zeroed(source, Seen(form, multiplied=True))
    return None


def _bool(node: Any, trace: Trace) -> Form | None:
    """The form of a tensor that is bool, or of the bool tensor that it was cast from; None if it is neither."""
    if not is_tensor(node):
        return None
    form = trace[node]
    source = form.term.read.source
    if node.meta["val"].dtype == torch.bool:
        return form
    if not isinstance(source, fx.Node) or form.term.read.factors:
        return None
    if source.target is aten._to_copy.default:
        (before,) = arguments(source)[:1]
        if before.meta["val"].dtype != torch.bool:
            return None
        return replace(form, term=operations.term_of(trace[before], replace(form.term.read, then=())))
    return form if source.meta["val"].dtype == torch.bool else None


def _not_a_number(mask: Any, of: fx.Node, trace: Trace) -> tuple[fx.Node, ...]:
    """The nodes of a mask that is True where `of`, or any element of its row, is NaN; empty if the mask is another."""
    source = copied(mask, trace)
    if source is None:
        return ()
    if source.target is aten.any.dim:
        rows, _, keep = (*arguments(source), False)[:3]
        inner = _not_a_number(rows, of, trace) if keep else ()
        return (*inner, source) if inner else ()
    a, b = (*arguments(source), None, None)[:2]
    asks = source.target is aten.isnan.default or (source.target is aten.ne.Tensor and a is b)
    return (source,) if asks and copied(a, trace) is of else ()


def is_zero(value: Any, trace: Trace) -> bool:
    """Whether a number or a tensor is 0 throughout."""
    return constant_of(value) == 0 or (is_tensor(value) and isinstance(trace[value].term.parts, Zero))


def only_seen(
    summands: Sequence[Summand], seen: Seen, node: fx.Node, trace: Trace, *, safe: bool
) -> tuple[list[Summand], bool]:
    """Summands of scores in which keys that are not `seen` are hidden, and whether a row that sees no key is 0.

    `node` holds the weights; `safe`: they are 0, before some were set to 0, in a row that sees no key.

    Raises:
        Refusal: if the weights set to 0 after the softmax are not those of the keys that were hidden before it.
    """
    form, rank = seen.form, len(trace[node].dims)
    own = Summand(
        form, tuple(range(rank - len(form.dims), rank)), Mask(form.term, attends=True, inverted=seen.inverted)
    )
    products = [s for s in summands if isinstance(s.what, float)]
    masks = [s.what for s in summands if isinstance(s.what, Mask)]
    if len(products) + len(masks) == len(summands):  # no keys without values
        hides = all(mask.attends and mask.fill == -math.inf for mask in masks)
        hidden = [s for s in summands if isinstance(s.what, Mask) and s.what.attends]
        if seen.bounded:  # the bound counts unless the greatest score is of a key that is kept
            if hides and (safe or len(masks) == 1) and any(_same(each, own, trace) for each in hidden):
                return list(summands), safe or not seen.multiplied
            raise set_to_zero(node)
        if seen.renormed and hides:
            return [*summands, own], False
        if not seen.renormed and len(hidden) == len(masks) == 1 and _same(hidden[0], own, trace):
            (mask,) = masks
            return [*products, replace(hidden[0], what=replace(mask, fill=-math.inf))], _is_safe(mask, seen)
    raise set_to_zero(node)


def set_to_zero(node: fx.Node) -> Refusal:
    """The refusal for weights that are another function of the scores than a softmax."""
    reason = f"expected attention weights as a softmax gives them, found that {where(node)} sets some to 0 after"
    return Refusal(
        node, reason, "hide keys only before the softmax, or after it by the same mask that hides them before"
    )


def _is_safe(mask: Mask, seen: Seen) -> bool:
    """Whether rows that see no key are 0. With a fill of -inf they are NaN, which stays NaN when multiplied by 0."""
    return not seen.multiplied or mask.fill > -math.inf


def _same(hidden: Summand, kept: Summand, trace: Trace) -> bool:
    """Whether one mask hides exactly what the other sets to 0, or the other sets to 0 the rows that see nothing."""
    (one, hides), (other, hides_too) = (_literal(each, trace) for each in (hidden, kept))
    if (rows := _of_rows(other, hides_too, trace)) is not None:
        other, hides_too = _literal(replace(kept, form=rows, what=Mask(rows.term, True, inverted=hides_too)), trace)
    if hides != hides_too:
        return False
    (one, other), _ = operations.align([one, other], [hidden.labels, kept.labels])
    return one.term.read == other.term.read


def _of_rows(kept: Form, inverted: bool, trace: Trace) -> Form | None:
    """The mask of which `kept` tells, for each row, whether it sees any key; None if `kept` is no such reduction."""
    read = kept.term.read
    if not isinstance(read.source, fx.Node) or read.source.target not in (aten.any.dim, aten.all.dim):
        return None
    of, dim, keep = (*arguments(read.source), False)[:3]
    rank = len(trace[of].dims)
    says = read.source.target is (aten.all.dim if inverted else aten.any.dim)
    if not says or not keep or dim % rank != rank - 1 or kept.dims[-1:] != ((),):
        return None
    keys = Axis(trace[of].shape[-1])
    term = operations.term_of(trace[of], replace(read, dims=(*read.dims[:-1], (Digit(keys, keys.size),))))
    return Form((*kept.dims[:-1], (keys,)), term)


def _literal(mask: Summand, trace: Trace) -> tuple[Form, bool]:
    """A mask without its negations, and whether True rejects."""
    assert isinstance(mask.what, Mask)
    form, inverted = mask.form, mask.what.inverted
    while isinstance(source := form.term.read.source, fx.Node) and source.target in NEGATIONS:
        form = replace(form, term=operations.term_of(trace[arguments(source)[0]], form.term.read))
        inverted = not inverted
    return form, inverted
