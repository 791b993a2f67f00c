"""Say why an attention is no MLA site: what came nearest, and what would make it one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from ..algebra.terms import Join, Product, Read, Scaled, Segment, Sum, Term, Unread, made_of
from ..attention import outer
from ..attention.attention import Attention
from ..attention.pieces import WRITES
from ..nodes.arguments import RESHAPES, arguments, is_elementwise, is_tensor, takes_tensors
from ..nodes.constants import constant_of
from ..nodes.gradients import own_gradients
from ..nodes.refusal import Refusal, from_another_graph
from ..nodes.source import where
from ..trace.trace import Trace
from .in_few_bits import REMEDY, product_in_few_bits
from .multiplied import NORM, is_made_of, multiplied_product

_LINEAR = (
    "let nothing but views, casts, joins and sums lie between the up-projection and the attention: apply a norm, a "
    "nonlinearity or a rope to the latent before the up-projection, or to columns of their own"
)
_TORCHS = ("aten", "prims", "mla")
"""The namespaces of ops that need no decomposition."""
_SEAM = (
    "cut every piece into heads before they are joined: one view of all of them puts the seam between two pieces at "
    "other columns for other heads"
)
_OWN_OP = (
    "give the op a decomposition (torch._inductor.decomposition.register_decomposition), or, if it multiplies by a "
    "weight in few bits, leave this projection out of the quantisation"
)
_PIECES = "join the latents, as a whole each and over the same batch, and up-project them together"
_ADDENDS = "let all that is added up be up-projections of latents, or the same for all keys"


def stored_expanded(attention: Attention, trace: Trace) -> Refusal | None:
    """The refusal if keys and values are up-projected from one latent, but before they are cached."""
    values = list(_leaves(attention.value, trace, set()))
    keys = [leaf for score in attention.scores for leaf in _leaves(score.key, trace, set())]
    stored = [leaf.read for leaf in values if leaf.parts is None and _is_stored(leaf, trace)]
    factors = [_factors(leaf) for leaf in values if isinstance(leaf.parts, Product)]
    latents = [source for source in _factors_of_all(keys) if any(source in pair for pair in factors)]
    if not stored or not latents:
        return None
    return Refusal(
        attention.node,
        f"expected a cache of latents, found keys and values that are stored expanded: {name(stored[0])} beside what "
        f"is newly up-projected from {where(latents[0])}",
        "cache the latent, as transformers >= 5.15 does, and attend to learned keys separately",
        _node(stored[0]),
    )


def _is_stored(term: Term, trace: Trace) -> bool:
    """Whether a term is an element of a tensor that holds values: not of a mask, a constant, or what is computed."""
    node = _node(term.read)
    if node is None or is_elementwise(node) or constant_of(node) is not None or trace.lost(term) is not None:
        return False
    computed = any(is_tensor(of) and isinstance(trace[of].term.parts, Product) for of in node.all_input_nodes)
    return bool(node.meta["val"].dtype != torch.bool) and not computed


def _is_product(segment: Segment) -> bool:
    return isinstance(segment.term.parts, Product)


def no_up_projection(attention: Attention, keys: Sequence[Term], latent: Read | None, trace: Trace) -> Refusal:
    """The refusal if nothing in the keys is an up-projection of `latent`, or (None) if the values are none at all."""
    node = attention.node
    if latent is None:
        stop = _stop(attention.value, trace)
        if (by_function := own_gradients(node, stop)) is not None:
            return by_function
        remedy = _ADDENDS if isinstance(attention.value.parts, Sum) else _between(stop, trace)
        if isinstance(attention.value.parts, Join) and all(map(_is_product, attention.value.parts.segments)):
            remedy = _PIECES
        multiplied = multiplied_product(attention.value, trace)
        found = describe(attention.value, trace)
        if multiplied is not None:
            found, remedy = multiplied.found, multiplied.remedy
        elif (coded := product_in_few_bits(attention.value, trace)) is not None:
            found, remedy = coded, REMEDY
        reason = f"expected values that are an up-projection of a latent, found {found}"
        if stop is not None and stop.op == "placeholder":
            remedy = from_another_graph("the up-projection")
        return Refusal(node, reason, remedy, stop)
    heads = {*attention.rows} - latent.axes
    for term in keys:
        if term.axes & heads and (by_function := own_gradients(node, _stop(term, trace))) is not None:
            return by_function
    over = set(attention.keys)
    for term in keys:
        sides = (term.parts.left, term.parts.right) if isinstance(term.parts, Product) else ()
        running = [side.read for side in sides if side.axes & over]
        if len(running) == 1:
            reason = f"expected keys and values from one latent, found keys from {name(running[0])} and values from "
            return Refusal(node, reason + name(latent), "project both from the same tensor", _node(running[0]))
    multiplied = next(filter(None, (multiplied_product(term, trace) for term in keys)), None)
    for times in (found for term in keys for found in outer.multiplied(term, trace)):
        factor = times.by
        if multiplied is None and factor.axes & over and factor.axes <= over.union(attention.rows):
            reason = (
                f"expected keys that are an up-projection of {name(latent)}, found keys that are "
                f"each multiplied by a number, {name(factor.read)}"
            )
            if is_made_of(factor, times.of, trace):
                return Refusal(node, f"{reason}, which is computed from them as in a norm", NORM)
            return Refusal(node, reason, "multiply the scores by that number instead: (q @ k.mT) * number")
    found = "; ".join(describe(term, trace) for term in keys) if multiplied is None else multiplied.found
    reason = f"expected keys of which some columns are an up-projection of {name(latent)}, found {found}"
    stop = next(filter(None, (_stop(term, trace) for term in keys)), None)
    return Refusal(node, reason, _between(stop, trace) if multiplied is None else multiplied.remedy, stop)


def _between(stop: fx.Node | None, trace: Trace) -> str:
    """The remedy for an op between an up-projection and the attention at which the trace stopped."""
    if stop is None:
        return _LINEAR
    if isinstance(stop.target, torch._ops.OpOverload) and stop.target.namespace not in _TORCHS:
        return _OWN_OP
    joined = stop.target in RESHAPES and isinstance(trace[arguments(stop)[0]].term.parts, Join)
    return _SEAM if joined else _LINEAR


def _node(read: Read) -> fx.Node | None:
    return read.source if isinstance(read.source, fx.Node) else None


def _stop(term: Term, trace: Trace) -> fx.Node | None:
    """The node at which the trace of a term ends."""
    lost = trace.lost(term)
    return lost.node if lost is not None and isinstance(lost.node, fx.Node) else _node(term.read)


def _leaves(term: Term, trace: Trace, seen: set[fx.Node]) -> Iterator[Term]:
    """The pieces that a tensor was put together from, as the graph describes them where it holds the tensor."""
    source = term.read.source
    if isinstance(source, fx.Node) and is_tensor(source) and not isinstance(term.parts, Product):
        term = trace[source].term
    if isinstance(term.parts, Join):
        for segment in term.parts.segments:
            if segment.term.read.source is source:  # columns of a buffer, about which no more is known
                yield segment.term
            else:
                yield from _leaves(segment.term, trace, seen)
    elif term.parts is None and isinstance(source, fx.Node) and source.target in WRITES:
        for operand in source.all_input_nodes:
            filled = operand.op == "call_function" and not takes_tensors(operand) and trace.lost(term) is not None
            if is_tensor(operand) and operand not in seen and not filled:  # a buffer that this graph fills is no cache
                seen.add(operand)
                yield from _leaves(trace[operand].term, trace, seen)
    elif isinstance(term.parts, Sum):  # an up-projection with a bias
        yield from (summand for summand in term.parts.terms if isinstance(summand.parts, Product))
    else:
        yield term


def _factors_of_all(leaves: Iterable[Term]) -> Iterator[fx.Node]:
    for leaf in leaves:
        if isinstance(leaf.parts, Product):
            yield from _factors(leaf)


def _factors(leaf: Term) -> list[fx.Node]:
    """The tensors that a product is made of, computed ones before the graph's inputs: a latent before its weight."""
    assert isinstance(leaf.parts, Product)
    sources = [leaf.parts.left.read.source, leaf.parts.right.read.source]
    return sorted((s for s in sources if isinstance(s, fx.Node)), key=lambda node: node.op == "placeholder")


def describe(term: Term, trace: Trace) -> str:
    """What an element is, in words, and why no more is known of it."""
    match term.parts:
        case Product(left, right):
            return f"a product of {name(left.read)} and {name(right.read)}"
        case Sum(terms):
            return "a sum of " + " and ".join(describe(term, trace) for term in terms)
        case Join(_, segments):
            return f"{len(segments)} pieces: " + ", ".join(describe(segment.term, trace) for segment in segments)
    return name(term.read) + trace.because(term)


def name(read: Read) -> str:
    """The tensor that is read, in words."""
    match read.source:
        case Unread(node) | (fx.Node() as node):
            return where(node) if isinstance(node, fx.Node) else str(node)
        case Scaled(of):
            return name(of)
    if parts := made_of(read.source):
        return f"{name(parts[0])} and {len(parts) - 1} more" if len(parts) > 1 else name(parts[0])
    return str(read.source)
