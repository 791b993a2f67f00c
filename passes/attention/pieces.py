"""Products that were computed piece by piece, in a loop over sequences or heads, and joined.

o = empty(...);  o[0] = w[0] @ v[0];  o[1] = w[1] @ v[1]        the last tensor that is written is the product w @ v
"""

from __future__ import annotations

from torch import fx

from ..algebra.terms import Product
from ..nodes.arguments import aten, is_tensor
from ..trace.trace import Trace

PRODUCTS = (aten.bmm.default, aten.mm.default)
_JOINS = {
    aten.cat.default,
    aten.index_copy.default,
    aten.index_put.default,
    aten.scatter.src,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.stack.default,
}


def is_join_of_products(node: fx.Node, trace: Trace) -> bool:
    """Whether a tensor is one product over all of it, and joined from pieces of that."""
    term = trace[node].term
    return node.target in _JOINS and isinstance(term.parts, Product) and term.read.source is node


def pieces_of(node: fx.Node, trace: Trace) -> set[fx.Node]:
    """What a product was joined from: the products that nothing else reads, and the tensors between them and it."""
    if not is_tensor(node) or not is_join_of_products(node, trace):
        return set()
    products, between, unread = set[fx.Node](), {node}, set[fx.Node]()
    for earlier in reversed(node.graph.nodes):
        users = earlier.users.keys() - unread
        if earlier is node or earlier.op != "call_function":
            continue
        if not users and not earlier.is_impure():
            unread.add(earlier)
        elif users and users <= between:
            (products if earlier.target in PRODUCTS else between).add(earlier)
    return products | between - {node}
