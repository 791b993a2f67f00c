"""Find attention: sealed SDPA, ops over packed sequences, and `softmax(scores) @ value` written by hand.

    q, k, v -> mla.sealed_attention                                    one node
    q, k, v -> an op over packed sequences (see `packed`)              one node
    q, k    -> bmm -> [scale, add mask, where] -> softmax -> bmm v     a chain, whose scores may be a sum of products

Each becomes an `Attention`: which axes are the rows and keys of the scores and the columns of the values, and the terms
of q, k, v and the masks over these axes. Nothing here asks whether the attention is MLA.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from mla_compile.ops import SEALED

from ..algebra import operations
from ..algebra.sizes import Size, Unaligned, same
from ..algebra.terms import Form, Product
from ..nodes.arguments import arguments, aten
from ..nodes.guards import known_by_guard
from ..nodes.refusal import Refusal
from ..nodes.shapes import shape_of, size_of
from ..trace.trace import Trace
from .attention import Attention, Score
from .by_hand import from_weights
from .heads_apart import in_one
from .kernels import is_kernel
from .nearly import nearly_weights
from .outer import regrouped
from .packed import Call, packed_call
from .padded import without_zeros
from .pieces import PRODUCTS, joined_product, pieces_of
from .softmax import Weights, late, weights_of
from .summands import Mask


def find(graph: fx.Graph, trace: Trace) -> Iterator[Attention | Refusal]:
    """Every attention of the graph in order, or, in its place, the reason why it could not be read. Heads that are
    computed one by one are one attention, where their outputs are joined."""
    found = list(_all(graph, trace))
    joined = {piece for whole in found if isinstance(whole, Attention) for piece in pieces_of(whole.node, trace)}
    left = {each.node: each for each in found if each.node not in joined}
    for whole in in_one(graph, [each for each in left.values() if isinstance(each, Attention)], trace):
        for head in whole.heads_apart:
            del left[head.node]
        left[whole.node] = whole
    yield from (left[node] for node in graph.nodes if node in left)


def _all(graph: fx.Graph, trace: Trace) -> Iterator[Attention | Refusal]:
    for node in list(graph.nodes):
        try:
            if node.target is SEALED:
                yield _unpadded(_from_sealed(node, trace))
            elif node.target is torch.ops.higher_order.flex_attention:
                yield Refusal(
                    node,
                    "expected scores and masks that are tensors of the graph, found flex_attention, which computes "
                    "them in functions of its own",
                    "call scaled_dot_product_attention (transformers: model.set_attn_implementation('sdpa'))",
                )
            elif (call := packed_call(node)) is not None:
                yield _unpadded(_from_packed(call, trace))
            elif is_kernel(node):
                yield Refusal(
                    node,
                    "expected attention that is written in torch operations, found a call of an attention kernel",
                    "call scaled_dot_product_attention (transformers: model.set_attn_implementation('sdpa')); for "
                    "packed sequences, with a mask of the pairs that belong to the same sequence",
                )
            elif (product := _product_of_weights(node, trace)) is not None:
                yield _unpadded(from_weights(node, *product, trace))
            elif node.target in PRODUCTS and (refusal := nearly_weights(node, trace)) is not None:
                yield refusal
            elif node.target is aten.div.Tensor and (divided := late(node, trace)) is not None:
                yield _unpadded(from_weights(node, *divided, trace))
        except Refusal as refusal:
            yield refusal
        except Unaligned as error:
            if any(same(size, 0) for operand in node.all_input_nodes for size in shape_of(operand)):
                yield Refusal(node, "expected queries, keys and values, found an empty tensor")
            else:
                yield Refusal(node, f"expected queries, keys and values over common axes, found: {error}")


def _product_of_weights(node: fx.Node, trace: Trace) -> tuple[Form, int, Weights] | None:
    """For a product `node`, or a join of products: its form, which operand holds attention weights, and the weights."""
    if node.target in PRODUCTS:
        form, sources = trace[node], [trace[operand].term.read.source for operand in arguments(node)[:2]]
    elif (joined := joined_product(node, trace)) is not None:
        assert isinstance(joined.term.parts, Product)
        form, sources = joined, [joined.term.parts.left.read.source, joined.term.parts.right.read.source]
    else:
        return None
    for side, source in enumerate(sources):
        if (weights := weights_of(source, trace)) is not None:
            return form, side, weights
    if not isinstance(form.term.parts, Product):
        return None
    apart = regrouped(form.term.parts, lambda term: weights_of(term.read.source, trace) is not None, trace)
    if apart is None or (weights := weights_of(apart[0].left.read.source, trace)) is None:
        return None
    parts, node = apart
    return replace(form, term=replace(form.term, parts=parts)), 0, replace(weights, within=(*weights.within, node))


def _unpadded(attention: Attention) -> Attention:
    """The attention without the columns of zeros with which its values were padded."""
    found = without_zeros(attention.value, attention.columns)
    if found is None:
        return attention
    form, padding = found
    return replace(attention, columns=form.dims[0], value=form.term, padding=padding)


def _from_sealed(node: fx.Node, trace: Trace) -> Attention:
    q_node, k_node, v_node, mask_node, dropout, causal, scale, grouped = arguments(node)
    if dropout:
        raise Refusal(node, f"expected attention without dropout, found dropout_p={dropout}", "call model.eval()")
    q, k, v = trace[q_node], trace[k_node], trace[v_node]
    if any(same(size, 0) for size in (*k.shape, *v.shape)):
        raise Refusal(node, "expected queries, keys and values, found an empty tensor")
    rank = len(node.meta["val"].shape)
    batch = [f"batch {i}" for i in range(rank - 2)]
    q, k, v = (operations.expand(form, (1,) * (rank - len(form.dims)) + tuple(form.shape)) for form in (q, k, v))
    q_batch: list[str] = batch
    if grouped and len(q.dims[-3]) and q.shape[-3] != k.shape[-3]:
        if not same(k.shape[-3], v.shape[-3]):
            reason = f"expected as many heads of keys as of values, found {k.shape[-3]} and {v.shape[-3]}"
            raise Refusal(node, reason)
        q = _in_groups(q, rank - 3, k.shape[-3], node)
        q_batch = [*batch, "group"]
    labels: list[Sequence[str]] = [(*q_batch, "query", "width"), (*batch, "key", "width"), (*batch, "key", "column")]
    forms = [q, k, v]
    if mask_node is not None:
        mask = trace[mask_node]
        if q_batch is not batch and len(mask.dims) >= 3 and mask.dims[-3]:
            raise Refusal(node, "expected one mask for all heads of grouped attention, found one for each head")
        mask = operations.expand(mask, (1,) * (rank - len(mask.dims)) + tuple(mask.shape))
        forms.append(mask)
        labels.append((*batch, "query", "key"))
    scale = _scale(scale, q_node, node)
    aligned, axes = operations.align(forms, labels)
    out = [axes[label] for label in q_batch]
    if q_batch is not batch:
        out[-2:] = [(*out[-2], *out[-1])]
    rows = tuple(axis for dim in (*out, axes["query"]) for axis in dim)
    return Attention(
        node,
        dims=(*out, axes["query"], axes["column"]),
        rows=rows,
        keys=axes["key"],
        columns=axes["column"],
        scores=(Score(aligned[0].term, aligned[1].term, axes["width"], scale),),
        value=aligned[2].term,
        masks=(Mask(aligned[3].term, attends=mask_node.meta["val"].dtype == torch.bool),)
        if mask_node is not None
        else (),
        queries=axes["query"],
        causal=causal,
    )


def _scale(given: float | None, heads: fx.Node, node: fx.Node) -> float:
    """The scale given for the scores, or else `1 / sqrt(width)` for the width of `heads`, queries or keys."""
    if given is not None:
        return given
    width = known_by_guard(heads.meta["val"].shape[-1])
    if width is None:
        raise Refusal(node, "expected the head width or the scale to be known, found neither", "pass scale=")
    return 1 / math.sqrt(width)


def _in_groups(q: Form, dim: int, groups: Size, node: fx.Node) -> Form:
    """Queries with their heads, dimension `dim`, divided into `groups` that share keys."""
    heads = q.shape[dim]
    if not isinstance(heads, int) or not isinstance(groups, int):
        raise Refusal(node, f"expected head counts of grouped attention to be known, found {heads} and {groups}")
    return operations.view(q, (*q.shape[:dim], groups, heads // groups, *q.shape[dim + 1 :]))


def _from_packed(call: Call, trace: Trace) -> Attention:
    """Attention `[Tq, N, D]` over packed sequences. Only `packed` says which queries attend to which keys."""
    node = call.output
    q, k, v = trace[call.query], trace[call.key], trace[call.value]
    ranks = [len(form.dims) for form in (q, k, v)]
    if ranks != [3, 3, 3]:
        found = ", ".join(map(str, ranks))
        raise Refusal(node, f"expected packed tokens [tokens, heads, width], found {found} dimensions")
    if same(q.shape[0], 0) or same(k.shape[0], 0):
        raise Refusal(node, "expected packed tokens, found none")
    scale = _scale(call.scale, call.key, node)
    if not same(v.shape[2], size_of(node.meta["val"].shape[2])):
        raise Refusal(node, f"expected an output as wide as the values, found {v.shape[2]} columns of values")
    grouped = [] if same(q.shape[1], k.shape[1]) else ["group"]
    if grouped:
        q = _in_groups(q, 1, k.shape[1], node)
    labels: list[Sequence[str]] = [("query", "head", *grouped, "width"), ("key", "head", "width")]
    aligned, axes = operations.align([q, k, v], [*labels, ("key", "head", "column")])
    out = tuple(axis for label in ("head", *grouped) for axis in axes[label])
    return Attention(
        node,
        dims=(axes["query"], out, axes["column"]),
        rows=(*out, *axes["query"]),
        keys=axes["key"],
        columns=axes["column"],
        scores=(Score(aligned[0].term, aligned[1].term, axes["width"], scale),),
        value=aligned[2].term,
        masks=(),
        queries=axes["query"],
        packed=call.packed,
    )
