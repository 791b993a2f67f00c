"""Provenance: the `Form` of every tensor of a functional ATen graph.

The graph is walked once, in order, with one handler for each kind of op. A tensor is a leaf if no handler knows
its op, or if its sizes do not factor into axes: then only its shape is known. The reason is kept, for reports of
why a site is unchanged.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from torch import fx

from ..algebra import operations
from ..algebra.sizes import Unaligned
from ..algebra.terms import Form, Lost, Read, Term
from ..nodes.arguments import is_pointwise, is_tensor, takes_tensors
from ..nodes.common_subexpressions import CommonSubexpressions
from ..nodes.shapes import shape_of
from ..nodes.source import where
from . import arithmetic, collectives, halves, joins, lookups, parts, reductions, slices, views
from .handler import Handlers, pointwise
from .unhandled import UNHANDLED

_FILES = (views, parts, slices, joins, arithmetic, reductions, lookups, halves, collectives)
TABLES = tuple(file.HANDLERS for file in _FILES)
HANDLERS = Handlers({op: handler for table in TABLES for op, handler in table.items()})
"""All handlers. No op is in two tables."""


class Trace:
    """The forms of a graph's tensors, by node."""

    def __init__(self, graph: fx.Graph) -> None:
        self._forms: dict[fx.Node, Form] = {}
        self._stopped: dict[fx.Node, Lost] = {}
        common = CommonSubexpressions()
        for node in graph.nodes:
            first = common.first(node)
            if is_tensor(node):
                self._forms[node] = self._describe(node) if first is node else self._forms[first]

    def __getitem__(self, node: fx.Node) -> Form:
        return self._forms[node]

    def __contains__(self, node: fx.Node) -> bool:
        """Whether a node is a tensor that was in the graph when it was traced."""
        return node in self._forms

    def source(self, node: Any) -> fx.Node | None:
        """The node that holds a tensor's elements: the tensor itself, or what it is a view or a copy of.

        None if `node` is no tensor, or no node holds all of its elements.
        """
        source = self._forms[node].term.read.source if is_tensor(node) else None
        return source if isinstance(source, fx.Node) else None

    def at(self, read: Read) -> Term:
        """The element that a read names, with what is known of the tensor: what it is made of, and how it is stored."""
        if isinstance(read.source, fx.Node):
            with contextlib.suppress(Unaligned):
                return operations.term_of(self._forms[read.source], read)
        return Term(read)

    def same(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two tensors are one common subexpression."""
        return a in self and b in self and self._forms[a] is self._forms[b]

    def lost(self, term: Term) -> Lost | None:
        """Why no more is known of what a term is made of, and the node at which the trace stopped.

        None if nothing was lost: if the term reads an input, for example, or an elementwise function of other tensors.
        """
        source = term.read.source
        return term.lost or (self._stopped.get(source) if isinstance(source, fx.Node) else None)

    def because(self, term: Term) -> str:
        """The end of a sentence about a term: where and why the trace stopped. Empty if nothing was lost."""
        lost = self.lost(term)
        if lost is None:
            return ""
        stop = lost.node if lost.node is not term.read.source else None
        return f", where the trace stopped{f' in {where(stop)}' if isinstance(stop, fx.Node) else ''}: {lost.reason}"

    def _describe(self, node: fx.Node) -> Form:
        if node.op == "call_function":
            handler = HANDLERS.get(node.target, pointwise if is_pointwise(node.target) else None)
            try:
                if handler is None:
                    raise Unaligned(UNHANDLED.get(node.target, "an op that the passes do not know"))
                return _placed(handler(self, node), node)
            except Unaligned as error:
                if takes_tensors(node):
                    self._stopped[node] = Lost(str(error), node)
        return operations.leaf(node, shape_of(node))


def _placed(form: Form, node: fx.Node) -> Form:
    """The form that a handler made for `node`; what was lost in making it is attributed to `node`."""

    def place(term: Term) -> Term:
        if term.lost is None or term.lost.node is not None:
            return term
        return replace(term, lost=replace(term.lost, node=node))

    return operations.map_terms(form, place)
