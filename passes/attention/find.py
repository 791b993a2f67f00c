"""Find attention: sealed SDPA, and `softmax(scores) @ value` written by hand.

    q, k, v -> mla.sealed_attention                                    one node
    q, k    -> bmm -> [scale, add mask, where] -> softmax -> bmm v     a chain, its scores perhaps a sum of products

Both come out as one `Attention`: which axes are rows, keys and columns of the scores, and the terms of q, k, v and the
masks over these axes. Nothing here asks whether the attention is MLA.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import fx

from mla_compile.ops import SEALED

from ..algebra import operations
from ..algebra.sizes import Size, Unaligned, product, same
from ..algebra.terms import Digit, Dim, Form, Product, Term
from ..nodes.arguments import arguments, aten, is_tensor
from ..nodes.refusal import Refusal
from ..nodes.shapes import size_of
from ..nodes.source import where
from ..trace.trace import Trace
from .attention import Attention, Opaque, Score
from .functions import Reading, derived, read_function
from .kernels import is_kernel
from .nearly import nearly_weights
from .outer import regrouped, times
from .packed import Call, packed_call
from .padded import without_zeros
from .pieces import PRODUCTS, joined_product, pieces_of
from .scores import Factor, KeyRange, Mask, Number, Sink, Summand, scores_of
from .softmax import Weights, late, weights_of
from .told import told
from .within import products_within
from .zeroed import only_seen, set_to_zero


def find(graph: fx.Graph, trace: Trace) -> Iterator[Attention | Refusal]:
    """Every attention of the graph in order, or the reason why one could not be read."""
    found = list(_all(graph, trace))
    joined = {piece for whole in found if isinstance(whole, Attention) for piece in pieces_of(whole.node, trace)}
    yield from (each for each in found if each.node not in joined)


def _all(graph: fx.Graph, trace: Trace) -> Iterator[Attention | Refusal]:
    for node in list(graph.nodes):
        try:
            if node.target is SEALED:
                yield _unpadded(_from_sealed(node, trace))
            elif node.target is torch.ops.higher_order.flex_attention:
                yield Refusal(
                    node,
                    "expected scores and masks that are tensors of the graph, found flex_attention, which has them in "
                    "functions",
                    "call scaled_dot_product_attention (transformers: model.set_attn_implementation('sdpa'))",
                )
            elif (call := packed_call(node)) is not None:
                yield _unpadded(_from_packed(call, trace))
            elif is_kernel(node):
                yield Refusal(
                    node,
                    "expected attention that torch's own operations say, found an op of a library's kernel",
                    "call scaled_dot_product_attention (transformers: model.set_attn_implementation('sdpa')), for "
                    "packed sequences with a mask of the pairs that have one sequence",
                )
            elif (product := _product_of_weights(node, trace)) is not None:
                yield _unpadded(_from_weights(node, *product, trace))
            elif node.target in PRODUCTS and (refusal := nearly_weights(node, trace)) is not None:
                yield refusal
            elif node.target is aten.div.Tensor and (divided := late(node, trace)) is not None:
                yield _unpadded(_from_weights(node, *divided, trace))
        except Refusal as refusal:
            yield refusal
        except Unaligned as error:
            yield Refusal(node, f"expected queries, keys and values over common axes, found that {error}")


def _product_of_weights(node: fx.Node, trace: Trace) -> tuple[Form, int, Weights] | None:
    """The form of a product `node`, or of products that it joins, which operand are attention weights, and these."""
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
    """An attention of the values that are not zeros, if those are columns one behind the other."""
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
    rank = len(node.meta["val"].shape)
    batch = [f"batch {i}" for i in range(rank - 2)]
    q, k, v = (operations.expand(form, (1,) * (rank - len(form.dims)) + tuple(form.shape)) for form in (q, k, v))
    q_batch: list[str] = batch
    if grouped and len(q.dims[-3]) and q.shape[-3] != k.shape[-3]:
        heads, groups = q.shape[-3], k.shape[-3]
        if not isinstance(heads, int) or not isinstance(groups, int) or k.shape[-3] != v.shape[-3]:
            raise Refusal(node, f"expected head counts of grouped attention to be known, found {heads} and {groups}")
        q = operations.view(q, (*q.shape[:-3], groups, heads // groups, *q.shape[-2:]))
        q_batch = [*batch, "group"]
    labels: list[Sequence[str]] = [(*q_batch, "query", "width"), (*batch, "key", "width"), (*batch, "key", "column")]
    forms = [q, k, v]
    if mask_node is not None:
        mask = trace[mask_node]
        if q_batch is not batch and len(mask.dims) >= 3 and mask.dims[-3]:
            raise Refusal(node, "expected one mask for all heads of grouped attention, found one a head")
        mask = operations.expand(mask, (1,) * (rank - len(mask.dims)) + tuple(mask.shape))
        forms.append(mask)
        labels.append((*batch, "query", "key"))
    width = q.shape[-1]
    if scale is None:
        if not isinstance(width, int):
            raise Refusal(node, "expected the head width or the scale to be known, found neither", "pass scale=")
        scale = 1 / math.sqrt(width)
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


def _from_packed(call: Call, trace: Trace) -> Attention:
    """Attention `[Tq, N, D]` of packed sequences, of which only `packed` says who meets whom."""
    node = call.output
    q, k, v = trace[call.query], trace[call.key], trace[call.value]
    if any(len(form.dims) != 3 for form in (q, k, v)):
        raise Refusal(node, f"expected packed tokens [tokens, heads, width], found {len(q.dims)} dimensions")
    if same(q.shape[0], 0) or same(k.shape[0], 0):
        raise Refusal(node, "expected packed tokens, found none")
    heads, groups = q.shape[1], k.shape[1]
    scale = call.scale
    if scale is None:
        width = next((form.shape[2] for form in (k, q) if isinstance(form.shape[2], int)), None)
        if width is None:
            raise Refusal(node, "expected the head width or the scale to be known, found neither", "pass scale=")
        scale = 1 / math.sqrt(width)
    if not same(v.shape[2], size_of(node.meta["val"].shape[2])):
        raise Refusal(node, f"expected an output as wide as the values, found {v.shape[2]} columns of values")
    grouped = [] if same(heads, groups) else ["group"]
    if grouped:
        if not isinstance(heads, int) or not isinstance(groups, int):
            raise Refusal(node, f"expected head counts of grouped attention to be known, found {heads} and {groups}")
        q = operations.view(q, (q.shape[0], groups, heads // groups, q.shape[2]))
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


def _from_weights(
    node: fx.Node, output: Form, side: int, weights: Weights, trace: Trace, whole: str | None = None
) -> Attention:
    """Attention that ends in `node`, `output` being its product, perhaps before it is divided.

    `whole`, if given, is why all scores of all heads have to be computed at once where they are more than a sum.
    """
    parts = _factors(node, output.term, trace)
    probabilities = (parts.left, parts.right)[side]
    dim = weights.dim
    keys_read = _part(probabilities.read.dims[dim])
    others = [digits for i, digits in enumerate(probabilities.read.dims) if i != dim]
    if keys_read is None or any(not digit.whole for digits in others for digit in digits):
        reason = "expected the whole of the attention weights to meet the values, found a part of them"
        raise Refusal(node, reason, "multiply all of the softmax's result with the values")
    place = output.term.read.source
    assert isinstance(place, fx.Node)
    reader = _other_reader(weights, place, trace)
    score_dims = tuple(tuple(d.axis for d in dim if d.axis is not None) for dim in probabilities.read.dims)
    shares = weights.shares
    summands = scores_of(weights.scores, KeyRange(dim, *keys_read), trace, weights.factor, shifted=shares is None)
    numbers = [s.what.score for s in summands if isinstance(s.what, Number)]
    if shares is not None:
        summands += _sinks(shares.sinks, len(score_dims), dim, weights.factor, trace)
        numbers += shares.numbers
    if weights.seen is not None and reader is None:
        summands, safe = only_seen(summands, weights.seen, weights.node, trace)
        weights = replace(weights, safe=safe)
    products = [s for s in summands if isinstance(s.what, float)]
    masks = [s for s in summands if isinstance(s.what, Mask)]
    sinks = [s for s in summands if isinstance(s.what, Sink)]
    opaque = reader is not None or not products or _tangled(products, [*masks, *sinks], weights)
    if opaque:
        if weights.seen is not None and reader is None:
            raise set_to_zero(weights.node)
        products, masks, sinks, numbers = products_within(weights.scores, KeyRange(dim, *keys_read), trace), [], [], []
        if not products:
            reason = f"expected scores that are a sum of products, found {where(weights.scores)}"
            reason += trace.because(trace[weights.scores].term)
            raise Refusal(node, reason, stopped=weights.scores)
        if place is not node:  # divided after: only the product changes
            return _from_weights(place, trace[place], side, weights, trace, f"weights that {where(node)} divides after")
    own = [("out", i) for i in range(len(output.dims))]
    exposed = Form((*output.dims, *score_dims), output.term)
    factors = [factor for summand in products for factor in summand.factors]
    added = [replace(summand, form=form, added=()) for summand in products for form in summand.added]

    def align(function: Sequence[Summand]) -> tuple[Form, list[list[Form]], dict[Hashable, Dim]]:
        groups: list[Sequence[Summand | Factor]] = [products, masks, sinks, factors, added, function]
        operands = [operand for group in groups for operand in group]
        forms, axes = operations.align(
            [exposed, *(operand.form for operand in operands)],
            [[*own, *range(len(score_dims))], *(operand.labels for operand in operands)],
        )
        rest = iter(forms)
        return next(rest), [list(islice(rest, len(group))) for group in groups], axes

    reading: Reading | str = whole or ""
    if opaque and shares is not None:
        reading = f"more than a sum in {where(weights.node)}"
    elif opaque and whole is None and reader is None:
        reading = read_function(products, KeyRange(dim, *keys_read), weights, trace)
    try:
        result, aligned, axes = align(reading.forms if isinstance(reading, Reading) else ())
    except Unaligned as error:
        if not isinstance(reading, Reading):
            raise
        reading = f"that {error}"
        result, aligned, axes = align(())
    of_products, of_masks, of_sinks, of_factors, of_added, of_function = aligned
    parts = _factors(node, result.term, trace)
    keys = axes[dim]
    if parts.summed != keys:
        reason = "expected the values to be summed over the keys of the softmax, found another axis"
        raise Refusal(node, reason, "take the softmax over the keys")
    value = told((parts.right, parts.left)[side], keys, trace)
    rows = tuple(axis for i in range(len(score_dims)) if i != dim for axis in axes[i])
    scores = []
    for form, summand in zip(of_products, products, strict=True):
        assert isinstance(summand.what, float)
        score = _score(node, form.term, keys, summand.what, trace)
        for factor in summand.factors:
            score = replace(score, query=times(score.query, of_factors.pop(0).term.read, divides=factor.divides))
        scores.append(score)
    found = []
    for form, summand in zip(of_masks, masks, strict=True):
        assert isinstance(summand.what, Mask)
        found.append(replace(summand.what, term=form.term))
    takers = []
    for form, summand in zip(of_sinks, sinks, strict=True):
        assert isinstance(summand.what, Sink)
        takers.append(replace(summand.what, term=form.term, keys=form.dims[dim]))
    dims = result.dims[: len(output.dims)]
    columns = tuple(axis for d in dims for axis in d if axis not in rows)
    kept = None
    if opaque:
        reads = tuple(form.term.read for form in of_products)
        function = reading if isinstance(reading, str) else reading.aligned(of_function, reads, dim)
        beside = tuple(tuple(of_added.pop(0).term for _ in summand.added) for summand in products)
        kept = Opaque((parts.left, parts.right)[side].read, reads, reader, function, beside)
    return Attention(
        node,
        dims,
        rows,
        keys,
        columns,
        tuple(scores),
        value,
        tuple(found),
        tuple(takers),
        share=_log_sum_exp(numbers),
        strict_rows=not weights.safe and (shares is not None or not (takers or numbers)),
        numbers=weights.numbers,
        opaque=kept,
    )


def _sinks(nodes: Sequence[fx.Node], rank: int, dim: int, factor: float, trace: Trace) -> list[Summand]:
    """Scores of one key each that are broadcast to those of `rank` dimensions."""
    found = []
    for k, node in enumerate(nodes):
        form = trace[node]
        own = (("share", k) if label == dim else label for label in range(rank - len(form.dims), rank))
        found.append(Summand(form, tuple(own), Sink(form.term, factor)))
    return found


def _log_sum_exp(numbers: Sequence[float]) -> float:
    greatest = max(numbers, default=-math.inf)
    return greatest + math.log(sum(math.exp(n - greatest) for n in numbers)) if numbers else greatest


def _factors(node: fx.Node, output: Term, trace: Trace) -> Product:
    """The attention weights and the values. Raises Refusal if what comes out is not their product any more."""
    if not isinstance(output.parts, Product):
        reason = "expected attention weights and values over common axes, found that they do not factor"
        raise Refusal(node, reason + trace.because(output))
    return output.parts


def _tangled(products: Sequence[Summand], masks: Sequence[Summand], weights: Weights) -> bool:
    """Whether a mask, a sink or a factor is made of the products that it is one of."""
    own = derived(products, weights.node)
    beside = [mask.form for mask in masks] + [factor.form for product in products for factor in product.factors]
    return any(form.term.read.source in own for form in beside)


def _part(digits: Sequence[Digit]) -> tuple[Size, Size] | None:
    """Start and size of the indices of a dimension that a read takes, None if they are not one run of it."""
    if all(digit.whole for digit in digits):
        return 0, product(digit.extent for digit in digits)
    if len(digits) != 1 or digits[0].step != 1:
        return None
    return digits[0].start, digits[0].axis.size if digits[0].axis is not None else 1


def _score(node: fx.Node, term: Term, keys: Dim, scale: float, trace: Trace) -> Score:
    parts = term.parts
    if not isinstance(parts, Product):
        reason = "expected the product of queries and keys to keep its axes, found that it does not factor"
        raise Refusal(node, reason + trace.because(term))
    apart = regrouped(parts, lambda term: term.axes.isdisjoint(keys), trace)
    parts = parts if apart is None else apart[0]
    sides = parts.left, parts.right
    with_keys = [any(axis in side.axes for axis in keys) for side in sides]
    if with_keys == [False, False] and not keys:
        with_keys = [False, True]
    if with_keys == [True, False]:
        sides = sides[::-1]
    elif with_keys != [False, True]:
        raise Refusal(node, "expected one operand of the scores to run over the keys, found both or none")
    return Score(sides[0], told(sides[1], keys, trace), parts.summed, parts.scale * scale)


def _other_reader(weights: Weights, output: fx.Node, trace: Trace) -> fx.Node | None:
    """What reads the weights besides the product with the values: scores have to exist then."""
    own = {weights.node, *weights.within}
    ends = {output, weights.total, *pieces_of(output, trace)}
    pending, seen = list(own), set(own)
    while pending:
        for user in pending.pop().users:
            if user in ends or user in seen:
                continue
            if not is_tensor(user) or trace[user].term.read.source not in own:
                return user
            seen.add(user)
            pending.append(user)
    return None
