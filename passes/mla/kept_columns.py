"""Find the columns of a product that are left when values are no longer read, where one weight makes keys and values.

    kv = latent @ W_KV;  k = rope(kv[..., :P]);  v = kv[..., P:]         with v:      T L (P + V) multiply-adds a head
    k = rope(latent @ W_KV[:, :P])                                       without:     T L P

Nothing narrows a product of which only a part is read, so values would still be computed. A bias that is added to all
rows of the product is added to the columns that are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from ..algebra.sizes import product
from ..algebra.terms import Dim, Form, Product, Read, Sum, Term, Unread
from ..attention.attention import Attention
from ..nodes.arguments import is_tensor
from ..nodes.refusal import Refusal
from ..nodes.shapes import shape_of
from ..trace.trace import Trace
from .readable import is_held

_SIZES = torch.SymInt, int


@dataclass(frozen=True)
class KeptColumns:
    """`place`, the one view through which a product is read, apart from its values: over `dims` it is the product
    `parts` plus `biases`."""

    place: fx.Node
    dims: tuple[Dim, ...]
    parts: Product
    biases: tuple[Read, ...] = ()


def kept_columns(values: Term, attention: Attention, trace: Trace, why: Refusal) -> KeptColumns | None:
    """What is still read of the product that makes `values`; None if that is nothing.

    Raises:
        Refusal: `why`, if that may be all of it.
    """
    source = values.read.source
    made = source.node if isinstance(source, Unread) else source
    if not isinstance(made, fx.Node):
        raise why
    if attention.opaque is None and any(made in _nodes(score.key.read) for score in attention.scores):
        raise why  # keys are read from the product, not from a view of it
    if any(n.target is made.target and n is not made and trace.same(n, made) for n in made.graph.nodes):
        raise why  # the graph computes it twice: Inductor would compute it once
    chain = list(_chain(made, attention, trace))
    if not chain:
        return None
    place = chain[-1]
    form = trace[place]
    kept = _as_kept(place, form)
    if kept is None:
        raise why
    axes = {axis for dim in form.dims for axis in dim}
    left = sympy.cancel(sympy.sympify(product(shape_of(place))) / product(shape_of(made)))
    sides = kept.parts.left.axes | kept.parts.right.axes
    if not (left.is_number and left < 1) or kept.parts.left.axes & kept.parts.right.axes & axes or not axes <= sides:
        raise why
    return kept


def _as_kept(place: fx.Node, form: Form) -> KeptColumns | None:
    """A view as that of one product and of what is added to it, if the graph holds all of that; else None."""
    terms = form.term.parts.terms if isinstance(form.term.parts, Sum) else (form.term,)
    products = [term.parts for term in terms if isinstance(term.parts, Product)]
    biases = tuple(term.read for term in terms if not isinstance(term.parts, Product))
    if len(products) != 1 or form.term.read.then:
        return None
    reads = [products[0].left.read, products[0].right.read, *biases]
    return KeptColumns(place, form.dims, products[0], biases) if all(map(is_held, reads)) else None


def _nodes(read: Read) -> list[object]:
    return [read.source.node if isinstance(read.source, Unread) else read.source]


def _chain(made: fx.Node, attention: Attention, trace: Trace) -> Iterator[fx.Node]:
    """The tensor and its views, each of the one before, up to one that several views or another op read; nothing if
    only the attention reads the tensor."""
    known: dict[fx.Node, bool] = {}
    values = _nodes(attention.value.read)  # the product, or what adds something to it

    def is_view(node: fx.Node) -> bool:
        value = node.meta.get("val")
        if isinstance(value, list | tuple):  # parts of it
            return all(user.op == "call_function" and is_view(user) for user in node.users)
        sources = _nodes(trace[node].term.read) if node in trace else []
        return any(source is made or source in values for source in sources)

    def readers(node: fx.Node) -> list[fx.Node]:
        """What reads a view of the product, besides the attention and ops that only take its size."""
        users = (user for user in node.users if not isinstance(user.meta.get("val"), _SIZES))
        return [user for user in users if user is not attention.node and (not is_view(user) or is_read(user))]

    def is_read(node: fx.Node) -> bool:
        if node not in known:
            known[node] = bool(readers(node))
        return known[node]

    node: fx.Node | None = made if is_read(made) else None
    while node is not None:
        if is_tensor(node):
            yield node
        users = readers(node)
        node = users[0] if len(users) == 1 and is_view(users[0]) and not _is_changed(users[0], trace) else None


def _is_changed(node: fx.Node, trace: Trace) -> bool:
    return is_tensor(node) and bool(trace[node].term.read.then)
