"""One factor a key on keys and values both: it goes to the latent.

    key   = (latent W_UK) g        =        (g latent) W_UK
    value = (latent W_UV) g        =        (g latent) W_UV

So does the factor of a norm of the latent that is applied after the up-projection. Where keys and values have other
factors they have two latents, and are none.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from torch import fx

from ..algebra import operations
from ..algebra.made import multiplied
from ..algebra.sizes import Unaligned
from ..algebra.terms import Axis, Bits, Form, Join, Product, Read, Sum, Term, Unread, Zero
from ..attention.find import Attention
from ..nodes.arguments import arguments, aten, is_tensor
from ..trace.trace import Trace
from ..trace.weights import factors

_DIVIDE = {aten.div.Tensor, aten.div.Scalar}
_MULTIPLY = {aten.mul.Tensor, aten.mul.Scalar, *_DIVIDE}


def ungated(attention: Attention, trace: Trace) -> Attention | None:
    """An attention whose keys and values were multiplied by tensors, as products of what was; None if they were not."""
    keys = set(attention.keys)
    value = _without(attention.value, keys, trace)
    if value is None:
        return None
    scores = tuple(replace(s, key=_without(s.key, keys, trace) or s.key) for s in attention.scores)
    return replace(attention, value=value, scores=scores)


def _without(term: Term, keys: set[Axis], trace: Trace) -> Term | None:
    """A term as products with what their factors were multiplied by; None if nothing was."""
    if isinstance(term.parts, Join):
        terms = [_without(segment.term, keys, trace) for segment in term.parts.segments]
        if not any(terms):
            return None
        segments = tuple(replace(s, term=t or s.term) for s, t in zip(term.parts.segments, terms, strict=True))
        return replace(term, parts=replace(term.parts, segments=segments))
    node = term.read.source
    then = term.read.then
    if any(isinstance(step, Bits) for step in then):
        return None
    if then:  # a number that all was multiplied by after, and roundings
        inner = _without(replace(term, read=replace(term.read, then=())), keys, trace)
        number = math.prod((step for step in then if isinstance(step, float)), start=1.0)
        return None if inner is None else operations.scaled(Form((), inner), number).term
    if term.parts is not None or not isinstance(node, fx.Node) or node.target not in _MULTIPLY:
        return None
    divides = node.target in _DIVIDE
    a, b = arguments(node)[:2]
    if not is_tensor(a) or not (is_tensor(b) or b):
        return None
    with contextlib.suppress(Unaligned):
        if not is_tensor(b):
            inner = _without(_at(trace[a], trace[a].term, term.read), keys, trace)
            return None if inner is None else operations.scaled(Form((), inner), 1 / b if divides else b).term
        whole, forms = factors(trace, node)
        for form, factor in (forms,) if divides else (forms, forms[::-1]):
            product, by = (_at(whole, each.term, term.read) for each in (form, factor))
            product = _without(product, keys, trace) or product
            times = _times(product, by.read, keys, divides) if product.parts is not None else None
            if times is not None:
                return replace(times, read=term.read)
    return None


def _at(form: Form, term: Term, read: Read) -> Term:
    """A term over a form's axes as it is where a tensor is read, before what is done to that `then`."""
    return operations.term_of(replace(form, term=term), replace(read, then=()))


def _times(term: Term, by: Read, keys: set[Axis], divides: bool) -> Term | None:
    """A term times a factor, which the factors of products take; None if none of them has all its axes."""
    read = multiplied(term.read, by, divides=divides) if not isinstance(term.read.source, Unread) else term.read
    match term.parts:
        case None:
            return None if isinstance(term.read.source, Unread) else Term(read)
        case Zero():
            return term
        case Product(left, right) as parts:
            for side in sorted((left, right), key=lambda each: not each.axes & keys):
                if by.axes <= side.axes - set(parts.summed) and not isinstance(side.read.source, Unread):
                    own = Term(multiplied(side.read, by, divides=divides))
                    return Term(read, replace(parts, left=own) if side is left else replace(parts, right=own))
        case Sum(terms):
            each = [_times(addend, by, keys, divides) for addend in terms]
            known = tuple(addend for addend in each if addend is not None)
            return Term(read, Sum(known)) if len(known) == len(terms) else None
        case Join(axis, segments) if axis not in by.axes:
            pieces = [(segment, _times(segment.term, by, keys, divides)) for segment in segments]
            whole = tuple(replace(segment, term=piece) for segment, piece in pieces if piece is not None)
            return Term(read, Join(axis, whole)) if len(whole) == len(segments) else None
    return None
