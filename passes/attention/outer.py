"""Products of three tensors, two of which are multiplied before anything is summed, as `einsum` of three does.

sum_dl (q[s, d] c[t, l]) w[d, l]      =      sum_d q[s, d] (sum_l c[t, l] w[d, l])
sum_tl (p[s, t] w[v, l]) c[t, l]      =      sum_t p[s, t] (sum_l c[t, l] w[v, l])
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from ..algebra import made, operations
from ..algebra.operations import read_of
from ..algebra.sizes import Unaligned
from ..algebra.terms import Bits, Dim, Form, How, Product, Read, Term, Unread
from ..nodes.arguments import arguments, aten, is_tensor
from ..trace.trace import Trace
from ..trace.weights import factors


@dataclass(frozen=True)
class Multiplied:
    """`number * of * by`, element by element, or `number * of / by` if it `divides`. Casts of the whole are in `of`."""

    of: Term
    by: Term
    number: float
    divides: bool


def multiplied(term: Term, trace: Trace) -> Iterator[Multiplied]:
    """The ways in which a term is an elementwise product of two tensors, perhaps times a number: either may be `of`."""
    node, then = term.read.source, term.read.then
    if term.parts is not None or not isinstance(node, fx.Node) or any(isinstance(step, Bits) for step in then):
        return
    divides = node.target in (aten.div.Tensor, aten.div.Scalar)
    if not (divides or node.target in (aten.mul.Tensor, aten.mul.Scalar)):
        return
    a, b = arguments(node)[:2]
    with contextlib.suppress(Unaligned):
        if is_tensor(a) and isinstance(b, int | float) and b:
            form = operations.scaled(trace[a], 1 / b if divides else float(b))
            yield from multiplied(operations.term_of(form, term.read), trace)
        elif is_tensor(a) and is_tensor(b) and a is not b:
            whole, forms = factors(trace, node)
            read = replace(term.read, then=())
            first, second = (operations.term_of(replace(whole, term=form.term), read) for form in forms)
            number = math.prod(term.read.factors, start=1.0)
            for of, by in ((first, second),) if divides else ((first, second), (second, first)):
                form = Form((), of)
                for dtype in (step for step in then if not isinstance(step, float)):
                    form = operations.cast(form, dtype)
                yield Multiplied(form.term, by, number, divides)


def times(query: Term, by: Read, *, divides: bool) -> Term:
    """A query times, or divided by, what multiplies or divides all of its scores; in its own dtype."""
    return Term(in_own_dtype(made.multiplied(query.read, by, How.OVER if divides else How.TIMES), query.read))


def in_own_dtype(made_of: Read, query: Read) -> Read:
    """What is made of a query, in the dtype of that query."""
    casts = [step for step in query.then if isinstance(step, torch.dtype)]
    own = casts[-1:] or ([query.source.meta["val"].dtype] if isinstance(query.source, fx.Node) else [])
    return replace(made_of, then=tuple(own))


def regrouped(parts: Product, is_outer: Callable[[Term], bool], trace: Trace) -> tuple[Product, fx.Node] | None:
    """A product with one side that is itself `outer * inner`, as `outer` times the product of `inner` and the other
    side; and the node that multiplied the two.

    `outer`, for which `is_outer` holds, becomes the left side. None if there is none, or if one of the two products
    would sum over nothing.
    """
    if len(parts.summed) < 2:
        return None
    for side, other in ((parts.left, parts.right), (parts.right, parts.left)):
        for found in multiplied(side, trace):
            summed = tuple(axis for axis in parts.summed if axis not in found.by.axes)
            rest = tuple(axis for axis in parts.summed if axis in found.by.axes)
            within = bool(summed) and bool(rest) and {*summed} <= found.of.axes & other.axes
            if within and not found.divides and is_outer(found.by):
                node = side.read.source
                assert isinstance(node, fx.Node)
                inner = _contracted(node, found.of, other, summed)
                return Product(found.by, inner, rest, parts.scale * found.number), node
    return None


def _contracted(node: fx.Node, left: Term, right: Term, summed: Dim) -> Term:
    """A product that the graph does not hold as a tensor."""
    axes = (left.axes | right.axes).difference(summed)
    return Term(read_of(Unread(node), [(axis,) for axis in axes]).read, Product(left, right, summed))
