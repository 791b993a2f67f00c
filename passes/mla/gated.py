"""Move a factor that each key has, on keys and values both, to the latent.

    key   = (latent W_UK) g        =        (g latent) W_UK
    value = (latent W_UV) g        =        (g latent) W_UV

    key   = where(m, latent W_UK, 0)    =    where(m, latent, 0) W_UK        m: a bool of each key
    key   = (latent W_UK + bias) g           =        (g latent) W_UK + g bias         a latent of one column more

    key   = where(m, latent W1, latent W2)   =   where(m, latent, 0) W1 + where(m, 0, latent) W2

The same goes for the factor of a norm of the latent that is applied after the up-projection, for a factor of each group
of heads where groups have a latent each, and for factors of the addends of a sum. Where keys and values have different
factors, or only one of them has any, they have two latents, not one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from ..algebra import operations
from ..algebra.elementwise import addends
from ..algebra.made import constant, multiplied
from ..algebra.sizes import Size, Unaligned, product, total
from ..algebra.substitution import Split
from ..algebra.terms import Axis, Bits, Dim, Form, How, Join, Product, Read, Segment, Sum, Term, Unread, Zero
from ..attention.attention import Attention
from ..attention.changed import changed
from ..nodes.arguments import arguments, aten, factor_of, is_tensor
from ..trace.trace import Trace
from ..trace.weights import factors
from .chosen import Choice, choice_of
from .multiplied import multiplied_product

_DEPTH = 8
"""How many sums and products to take apart one after the other: each may double the work."""
_DIVIDE = {aten.div.Tensor, aten.div.Scalar}
_ADD = {aten.add.Tensor, aten.sub.Tensor}
_MIX = {aten.lerp.Tensor, aten.addcmul.default}
_MULTIPLY = {aten.mul.Tensor, aten.mul.Scalar, *_DIVIDE}


def ungated(attention: Attention, trace: Trace) -> Attention | None:
    """An attention with what multiplied its keys and values moved into their products; None if nothing did, or if
    only its keys are normed, whose norms take the products themselves."""
    attention = _divided(attention, trace)
    keys = set(attention.keys)
    value = _without(attention.value, keys, trace)
    moved = [_without(s.key, keys, trace) for s in attention.scores]
    if value is None and (not any(moved) or any(_is_normed(s.key, trace) for s in attention.scores)):
        return None
    scores = tuple(replace(s, key=key or s.key) for s, key in zip(attention.scores, moved, strict=True))
    return replace(attention, value=value or attention.value, scores=scores)


def _is_normed(term: Term, trace: Trace) -> bool:
    """Whether a term, or a piece of what it is joined from, was multiplied by what is computed from it."""
    if isinstance(join := term.parts or term.joined, Join):
        return any(_is_normed(segment.term, trace) for segment in join.segments)
    multiplied = multiplied_product(term, trace)
    return multiplied is not None and multiplied.is_norm


def _divided(attention: Attention, trace: Trace) -> Attention:
    """An attention with its heads split into groups where they are in the products that were multiplied: the result of
    an elementwise op has one axis for both."""
    rows = set(attention.rows).difference(attention.queries or ())
    with contextlib.suppress(Unaligned):
        while attention.opaque is None:
            terms = attention.value, *(score.key for score in attention.scores)
            found = next((pair for term in terms for pair in _merged(term, trace) if pair[0] in rows), None)
            if found is None:
                break
            axis, (slow, *faster) = found
            split = Split(Axis(slow.size), Axis(product(each.size for each in faster)))
            attention = changed(attention, {axis: split})
            rows |= {split.slow, split.fast}
    return attention


def _merged(term: Term, trace: Trace) -> Iterator[tuple[Axis, Dim]]:
    """Axes of a term that are several in the tensors that it was multiplied from, at any depth, each with these."""
    if (join := term.parts or term.joined) is not None:
        for segment in join.segments if isinstance(join, Join) else ():
            yield from _merged(segment.term, trace)
        return
    node, read = term.read.source, replace(term.read, then=())
    if not isinstance(node, fx.Node):
        return
    choice = choice_of(node, trace)
    if choice is None and node.target not in _MULTIPLY | _MIX:
        return
    whole, forms = factors(trace, node, () if choice is None else [*(trace[of] for of, _ in choice.of), choice.mask])
    for digits, axes in zip(read.dims, whole.dims, strict=True):
        if len(digits) == 1 and digits[0].whole and digits[0].axis is not None and len(axes) > 1:
            yield digits[0].axis, axes
    for form in forms:
        with contextlib.suppress(Unaligned):
            yield from _merged(_at(whole, form.term, read), trace)


def _without(term: Term, keys: set[Axis], trace: Trace, depth: int = 0) -> Term | None:
    """A term with what multiplied its products moved into their factors; None if nothing did.

    `depth` is how many sums and products were taken apart on the way to it.
    """
    if isinstance(term.parts, Join):
        terms = [_without(segment.term, keys, trace, depth) for segment in term.parts.segments]
        if not any(terms):
            return None
        segments = tuple(replace(s, term=t or s.term) for s, t in zip(term.parts.segments, terms, strict=True))
        return replace(term, parts=replace(term.parts, segments=segments))
    if isinstance(term.parts, Sum):
        terms = [_without(addend, keys, trace, depth) for addend in term.parts.terms]
        own = (t or addend for t, addend in zip(terms, term.parts.terms, strict=True))
        return replace(term, parts=Sum(tuple(addends(own)))) if any(terms) else None
    if term.parts is None and term.joined is not None and not term.read.then:
        joined = _without(replace(term, parts=term.joined, joined=None), keys, trace, depth)
        pieces = joined.parts.segments if joined is not None and isinstance(joined.parts, Join) else ()
        return joined if any(segment.term.parts is not None for segment in pieces) else None
    node = term.read.source
    then = term.read.then
    if any(isinstance(step, Bits) for step in then):
        return None
    if then:  # numbers that multiplied the whole of it later, and roundings
        inner = _without(replace(term, read=replace(term.read, then=())), keys, trace, depth)
        number = math.prod(term.read.factors, start=1.0)
        return None if inner is None else operations.scaled(Form((), inner), number).term
    if term.parts is not None or not isinstance(node, fx.Node) or depth == _DEPTH:
        return None
    if node.target in _ADD:
        return _without_any(term, node, keys, trace, depth + 1)
    if node.target in _MIX:
        return _mixed(term, node, keys, trace, depth + 1)
    if (choice := choice_of(node, trace)) is not None:
        return _chosen(term, choice, keys, trace, depth + 1)
    if node.target not in _MULTIPLY:
        return None
    how = How.OVER if node.target in _DIVIDE else How.TIMES
    a, b = arguments(node)[:2]
    if not is_tensor(a) or a is b or not (is_tensor(b) or (isinstance(b, int | float) and b)):
        return None
    with contextlib.suppress(Unaligned):
        if not is_tensor(b):
            inner = _without(_at(trace[a], trace[a].term, term.read), keys, trace, depth + 1)
            return None if inner is None else operations.scaled(Form((), inner), 1 / b if how is How.OVER else b).term
        whole, forms = factors(trace, node)
        for form, factor in (forms,) if how is How.OVER else (forms, forms[::-1]):
            times, by = (_at(whole, each.term, term.read) for each in (form, factor))
            times = _without(times, keys, trace, depth + 1) or times
            found = _changed(times, by.read, keys, how) if times.parts is not None else None
            if found is not None:
                return replace(found, read=term.read)
    return None


def _without_any(term: Term, node: fx.Node, keys: set[Axis], trace: Trace, depth: int) -> Term | None:
    """`term`, an element of the sum `node`, with what multiplied products in its addends moved into their factors."""
    a, b = arguments(node)[:2]
    factor = factor_of(node)
    if not (is_tensor(a) and is_tensor(b)) or a is b or factor is None:
        return None
    with contextlib.suppress(Unaligned):
        whole, forms = factors(trace, node)
        both = [_at(whole, form.term, term.read) for form in forms]
        moved = [_without(addend, keys, trace, depth) for addend in both]
        sign = factor if node.target is aten.add.Tensor else -factor
        first, second = (own or addend for own, addend in zip(moved, both, strict=True))
        second = operations.scaled(Form((), second), sign).term if sign != 1 else second
        return replace(term, parts=Sum(tuple(addends((first, second))))) if any(moved) else None
    return None


def _mixed(term: Term, node: fx.Node, keys: set[Axis], trace: Trace, depth: int) -> Term | None:
    """`term`, an element of what `lerp` or `addcmul` makes of products by numbers of the keys, as a sum of products."""
    with contextlib.suppress(Unaligned):
        whole, forms = factors(trace, node)
        if len(forms) != 3:
            return None
        operands = (_at(whole, form.term, term.read) for form in forms)
        a, b, c = (_without(operand, keys, trace, depth) or operand for operand in operands)
        moved: list[tuple[Term | None, float | None]]
        if node.target is aten.lerp.Tensor:  # a + c (b - a)
            moved = [(_multiplied(a, c, keys), -1.0), (_multiplied(b, c, keys), 1.0)]
        else:  # a + value b c
            moved = [(_multiplied(b, c, keys) or _multiplied(c, b, keys), factor_of(node, "value"))]
        others = [operations.scaled(Form((), one), number).term for one, number in moved if one is not None and number]
        if len(others) < len(moved):
            return None
        return replace(term, parts=Sum(tuple(addends((a, *others)))))
    return None


def _multiplied(term: Term, by: Term, keys: set[Axis]) -> Term | None:
    """A product, or a sum of some, times a number of each key in their factors; None if a term is neither."""
    return None if term.parts is None else _changed(term, by.read, keys, How.TIMES)


def _chosen(term: Term, choice: Choice, keys: set[Axis], trace: Trace, depth: int) -> Term | None:
    """`term`, an element of what a node chooses by a bool of each key from products and 0, as the sum of products of
    latents that are 0 where theirs are not chosen; None if it is not."""
    node = term.read.source
    assert isinstance(node, fx.Node)
    found: list[Term] = []
    with contextlib.suppress(Unaligned):
        for of, how in choice.of:
            whole, forms = factors(trace, node, (trace[of], choice.mask))
            one, by = (_at(whole, form.term, term.read) for form in forms)
            one = _without(one, keys, trace, depth) or one
            if one.parts is None or (moved := _changed(one, by.read, keys, how)) is None:
                return None
            found.append(moved)
        one, *others = found
        return replace(term, parts=Sum(tuple(addends(found)))) if others else replace(one, read=term.read)
    return None


def _at(form: Form, term: Term, read: Read) -> Term:
    """A term over a form's axes, at the place that `read` reads, before what that does to it `then`."""
    return operations.term_of(replace(form, term=term), replace(read, then=()))


def _changed(term: Term, by: Read, keys: set[Axis], how: How) -> Term | None:
    """A term that a factor changes, as does a factor of each product in it; None if in one neither has all axes of it.

    Only what runs over keys is set to 0: a weight would still be multiplied by latents that may be NaN.
    """
    read = multiplied(term.read, by, how) if not isinstance(term.read.source, Unread) else term.read
    match term.parts:
        case None:
            return None if isinstance(term.read.source, Unread) else Term(read)
        case Zero():
            return term
        case Product(left, right) as parts:
            for side in sorted((left, right), key=lambda each: not each.axes & keys):
                if how in (How.WHERE, How.UNLESS) and not side.axes & keys:
                    continue
                if by.axes <= side.axes - set(parts.summed) and not isinstance(side.read.source, Unread):
                    inner = _changed(side, by, keys, how) if side.parts is not None else None
                    own = inner or Term(multiplied(side.read, by, how))
                    return Term(read, replace(parts, left=own) if side is left else replace(parts, right=own))
        case Sum(terms):
            each = [_changed_bias(addend, by, keys, how) or _changed(addend, by, keys, how) for addend in terms]
            known = tuple(addend for addend in each if addend is not None)
            return Term(read, Sum(known)) if len(known) == len(terms) else None
        case Join(axis, segments):
            start: Size = 0
            pieces: list[Segment] = []
            for segment in segments:
                part = operations.piece_of(Term(by), axis, start, segment.axes).read
                of_piece = keys | set(segment.axes) if axis in keys else keys
                if (piece := _changed(segment.term, part, of_piece, how)) is None:
                    return None
                pieces.append(replace(segment, term=piece))
                start = total([start, segment.size])
            return Term(read, Join(axis, tuple(pieces)))
    return None


def _changed_bias(term: Term, by: Read, keys: set[Axis], how: How) -> Term | None:
    """A bias that a number of each key changes, as a product: the number is a latent of one column, and the bias its
    weight. None if the term is no bias, or is the same for all keys afterwards too."""
    if term.parts is not None or not term.axes.isdisjoint(keys) or by.axes.isdisjoint(keys):
        return None
    if isinstance(term.read.source, Unread):
        return None
    column = by if how is How.TIMES else multiplied(constant(replace(term.read, dims=(), then=()), 1.0, ()), by, how)
    return Term(multiplied(term.read, by, how), Product(Term(column), Term(term.read), ()))
