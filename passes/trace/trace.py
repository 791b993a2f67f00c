"""Provenance: the `Form` of every tensor of a functional ATen graph.

One walk over the graph in order, one handler for each kind of op. What no handler knows, or what does not factor
into axes, is a leaf: nothing but a tensor of its shape.
"""

from __future__ import annotations

from torch import fx

from ..algebra import operations
from ..algebra.gathers import Lookup
from ..algebra.numbers import Numbers
from ..algebra.sizes import Unaligned
from ..algebra.terms import Form
from ..nodes.arguments import is_pointwise, is_tensor
from ..nodes.common_subexpressions import Twins
from ..nodes.shapes import shape_of
from . import arithmetic, joins, lookups, parts, views
from .handler import Handlers, pointwise

HANDLERS = Handlers(views.HANDLERS | parts.HANDLERS | joins.HANDLERS | arithmetic.HANDLERS | lookups.HANDLERS)
"""All of them: no op is in two tables."""


class Trace:
    """The forms of a graph's tensors, by node."""

    def __init__(self, graph: fx.Graph) -> None:
        self._forms: dict[fx.Node, Form] = {}
        self.lookups: dict[fx.Node, Lookup] = {}
        """What the nodes that read through a table are made of, over the axes of their forms."""
        self.numbers: dict[fx.Node, Numbers] = {}
        """Likewise of products of a tensor in FP8 and its scales."""
        twins = Twins()
        for node in graph.nodes:
            first = twins.first(node)
            if is_tensor(node):
                self._forms[node] = self._describe(node) if first is node else self._forms[first]

    def __getitem__(self, node: fx.Node) -> Form:
        return self._forms[node]

    def _describe(self, node: fx.Node) -> Form:
        if node.op == "call_function":
            handler = HANDLERS.get(node.target)
            if handler is None and is_pointwise(node.target):
                handler = pointwise
            if handler is not None:
                try:
                    return handler(self, node)
                except Unaligned:
                    pass
        return operations.leaf(node, shape_of(node))
