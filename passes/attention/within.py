"""Find the products that scores are made of, whatever is done to them on the way to the softmax.

softmax(50 * tanh(q k^T / 50))              one, `q k^T`
softmax(baddbmm(mask, q, k^T))              one, and what was added to it in the same op

Where there are none, the graph may be given the scores, as behind a graph break.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import fx

from ..algebra.sizes import Size, product, same
from ..algebra.terms import Form, Product, Sum, Unread
from ..nodes.arguments import argument, arguments, aten, is_elementwise, is_tensor
from ..nodes.walk import walk
from ..trace.trace import Trace
from .scores import KeyRange, labels_through
from .summands import Summand


def products_within(node: fx.Node, keys: KeyRange, trace: Trace) -> list[Summand]:
    """The products of which a score tensor, apart from sinks, is an elementwise function, whatever function it is."""
    found: dict[fx.Node, Summand] = {}
    pending: list[tuple[fx.Node, tuple[int, ...]]] = [(node, tuple(range(len(trace[node].dims))))]
    seen = set[fx.Node]()
    while pending:
        node, labels = pending.pop()
        form = trace[node]
        if node in seen or not _is_of_keys(form, labels, keys):  # as a temperature of each query
            continue
        seen.add(node)
        source, through = form.term.read.source, labels_through(form, labels)
        if isinstance(form.term.parts, Product):
            factor = math.prod(form.term.read.factors)
            if isinstance(source, fx.Node) and form.term.read.whole and factor:
                found.setdefault(source, Summand(form, labels, 1 / factor))  # the product as it was before the factor
            continue
        multiplies = isinstance(source, fx.Node) and source.op == "call_function" and not is_elementwise(source)
        if isinstance(source, fx.Node) and multiplies and (added := _product_and_more(form)) is not None:
            found.setdefault(source, Summand(added[0], labels, 1.0, added=added[1]))
            continue
        if not isinstance(source, fx.Node) or through is None or source.op != "call_function":
            continue
        for operand in source.all_input_nodes if is_elementwise(source) else ():
            if is_tensor(operand):
                pending.append((operand, through[len(through) - len(trace[operand].dims) :]))
        along = through.index(keys.dim) if keys.dim in through else None
        if along is not None and source.target is aten.cat.default and argument(source, "dim") % len(through) == along:
            values = [p for p in arguments(source)[0] if same(trace[p].shape[along], keys.size)]
            pending += [(piece, through) for piece in values[:1]]
    return list(found.values())


def inputs_within(scores: fx.Node, trace: Trace) -> list[fx.Node]:
    """The inputs of the graph of which a score tensor is an elementwise function, those with a number for each score.

    Empty if it is also a function of such numbers that the graph computes in another way.
    """

    def operands(node: fx.Node) -> list[fx.Node]:
        source = trace.source(node) or node
        return [of for of in source.all_input_nodes if is_tensor(of)] if is_elementwise(source) else []

    def numbers(node: fx.Node) -> Size:
        return product(axis.size for axis in trace[node].term.axes)

    ends = [node for node in walk([scores], operands) if not operands(node) and same(numbers(node), numbers(scores))]
    sources = [trace.source(node) or node for node in ends if node.meta["val"].is_floating_point()]
    return sources if all(source.op == "placeholder" for source in sources) else []


def _is_of_keys(form: Form, labels: tuple[int, ...], keys: KeyRange) -> bool:
    """Whether a tensor, whose dimensions are `labels`, differs between keys."""
    return keys.dim in labels and not form.term.axes.isdisjoint(form.dims[labels.index(keys.dim)])


def _product_and_more(form: Form) -> tuple[Form, tuple[Form, ...]] | None:
    """A product of an op that also adds, as `baddbmm` does, and what it adds; None for another sum or a part of one."""
    read = form.term.read
    terms = form.term.parts.terms if isinstance(form.term.parts, Sum) else ()
    products = [term for term in terms if isinstance(term.parts, Product)]
    others = [term for term in terms if term.parts is None and not isinstance(term.read.source, Unread)]
    if len(products) != 1 or len(others) != len(terms) - 1 or not read.whole or read.factors:
        return None
    return replace(form, term=replace(products[0], read=read)), tuple(replace(form, term=term) for term in others)
