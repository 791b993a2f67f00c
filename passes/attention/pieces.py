"""Products that were computed piece by piece, in a loop over sequences or heads, and joined.

o = empty(...);  o[0] = w[0] @ v[0];  o[1] = w[1] @ v[1]        the last tensor that is written is the product w @ v
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ..algebra.factored import factored
from ..algebra.terms import Form, Product
from ..nodes.arguments import arguments, aten, is_tensor
from ..trace.trace import Trace

PRODUCTS = (aten.bmm.default, aten.mm.default)
WRITES = {
    aten.cat.default,
    aten.index_copy.default,
    aten.index_put.default,
    aten.scatter.src,
    aten.select_scatter.default,
    aten.slice_scatter.default,
}
"""Ops whose result combines what one operand holds with what another one adds."""
_JOINS = WRITES | {aten.stack.default}


def joined_product(node: fx.Node, trace: Trace) -> Form | None:
    """The form, as one product, of a tensor that is joined from pieces of it; None if it is not."""
    if node.target not in _JOINS or not is_tensor(node) or trace[node].term.read.source is not node:
        return None
    form = trace[node]
    form = replace(form, term=factored(form.term))
    return form if isinstance(form.term.parts, Product) else None


def pieces_of(node: fx.Node, trace: Trace) -> set[fx.Node]:
    """What a product was joined from: products that nothing else reads, and the tensors between these and `node`."""
    if joined_product(node, trace) is None:
        return set()
    products, between, unread = set[fx.Node](), {node}, set[fx.Node]()
    for earlier in reversed(node.graph.nodes):
        users = {user for user in earlier.users.keys() - unread if not _overwrites(user, earlier, trace)}
        if earlier is node or earlier.op != "call_function":
            continue
        if not users and not earlier.is_impure():
            unread.add(earlier)
        elif users and users <= between:
            (products if earlier.target in PRODUCTS else between).add(earlier)
    return products | between - {node}


def _overwrites(write: fx.Node, target: fx.Node, trace: Trace) -> bool:
    """Whether a write to a slice is one to all of `target`, of which it then reads nothing: a write to all sequences,
    for instance, if their number is a symbol."""
    if write.target is not aten.slice_scatter.default:
        return False
    into, source = arguments(write)[:2]
    return into is target and source is not target and trace[write] == trace[source]
