"""Read attention whose softmax is written by hand: `softmax(scores) @ value`, whose scores may be a sum of products.

softmax((q k^T + q2 k2^T) * scale + mask) @ v      its products and masks, over common axes
softmax(50 * tanh(q k^T / 50)) @ v                 its product, and the function of it whose softmax is taken
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ..algebra.sizes import Size, Unaligned, product
from ..algebra.terms import Digit, Dim, Form, Product, Read, Term
from ..code.reading import nodes_of
from ..nodes.arguments import arguments, aten, is_tensor
from ..nodes.gradients import own_gradients
from ..nodes.refusal import Refusal, from_another_graph
from ..nodes.source import where
from ..trace.parts import SPLITS, UNBINDS
from ..trace.trace import Trace
from .attention import Attention, Opaque, Score
from .functions import Reading, derived, read_function
from .outer import regrouped, times
from .pieces import PRODUCTS, pieces_of
from .scores import KeyRange, only_a_part, scores_of
from .softmax import Weights
from .some_rows import is_of_some_rows
from .summands import Mask, Number, Sink, Summand
from .sums import Aligned, AlignedProduct, Sum
from .told import told
from .within import inputs_within, products_within
from .zeroed import only_seen, set_to_zero

_PARTS = SPLITS | UNBINDS
"""Ops that give several parts of a tensor."""


def from_weights(node: fx.Node, output: Form, side: int, weights: Weights, trace: Trace) -> Attention:
    """The attention that ends in `node`.

    `output` is the form of its product with the values, perhaps before a division by the sum; operand `side` of the
    product holds the weights.

    Raises:
        Refusal: if the code is another function of queries, keys and values than attention.
        Unaligned: if queries, keys and values have no axes in common.
    """
    scores = _read_scores(node, output, side, weights, trace)
    if not scores.opaque or scores.place is node:
        return _assembled(scores, _function(scores, trace), trace)
    # The division comes later and stays: the attention ends in the product.
    whole = f"weights that {where(node)} divides only after their product with the values"
    scores = _read_scores(scores.place, trace[scores.place], side, weights, trace)
    return _assembled(scores, _further_term(scores) or whole, trace)


@dataclass(frozen=True)
class _Scores:
    """The scores of an attention that ends in `node`, and how they are read as weights of the values."""

    node: fx.Node
    output: Form
    side: int
    weights: Weights
    probabilities: Read
    """The weights, as the product with the values reads them."""
    place: fx.Node
    """That product."""
    keys: KeyRange
    sum: Sum
    reader: fx.Node | None
    """What reads the weights besides that product."""
    opaque: bool
    """Whether the scores have to exist: they are more than a sum, or something else reads the weights."""

    @property
    def dims(self) -> list[Dim]:
        """The axes of their dimensions."""
        return [tuple(d.axis for d in digits if d.axis is not None) for digits in self.probabilities.dims]


def _read_scores(node: fx.Node, output: Form, side: int, weights: Weights, trace: Trace) -> _Scores:
    dim, place = weights.dim, output.term.read.source
    parts = _factors(node, output.term, trace)
    probabilities = (parts.left, parts.right)[side].read
    keys = _keys_of(probabilities, dim, node)
    assert isinstance(place, fx.Node)
    some = is_of_some_rows(probabilities, dim)
    reader = _other_reader(weights, place, trace, of_some_rows=some)
    found, weights = _summands(weights, keys, len(probabilities.dims), trace, zeros=reader is None)
    opaque = reader is not None or not found.products or _tangled(found, weights)
    if some and opaque:
        raise only_a_part(node)
    if some:
        found = found.in_rows(probabilities, dim)
    if opaque:
        if weights.seen is not None and reader is None:
            raise set_to_zero(weights.node)
        found = Sum(_products_alone(weights, keys, node, trace))
    return _Scores(node, output, side, weights, probabilities, place, keys, found, reader, opaque)


def _function(scores: _Scores, trace: Trace) -> Reading | str:
    """What is done to each score by itself, or why that cannot be said; nothing if it does not matter."""
    if (further := _further_term(scores)) or not scores.opaque or scores.reader is not None:
        return further
    return read_function(scores.sum.products, scores.keys, scores.weights, trace)


def _further_term(scores: _Scores) -> str:
    """Why the scores of all heads have to exist at once, if it is for a further term in the divisor of a softmax."""
    if not scores.opaque or scores.weights.shares is None:
        return ""
    return f"a softmax with a further term in its divisor, in {where(scores.weights.node)}"


def _assembled(scores: _Scores, function: Reading | str, trace: Trace) -> Attention:
    """The attention over axes that its scores, its values and a `function` of the scores have in common."""
    node, weights, dims, dim = scores.node, scores.weights, scores.dims, scores.weights.dim
    exposed = Form((*scores.output.dims, *dims), scores.output.term)
    rank = len(scores.output.dims)
    labels = [*(("out", i) for i in range(rank)), *range(len(dims))]
    aligned, function = _aligned_with(function, scores.sum, exposed, labels)
    parts = _factors(node, aligned.result.term, trace)
    keys = aligned.axes[dim]
    if parts.summed != keys:
        reason = "expected the values to be summed over the keys of the softmax, found another axis"
        raise Refusal(node, reason, "take the softmax over the keys, and do not mix the weights of heads after it")
    rows = tuple(axis for i in range(len(dims)) if i != dim for axis in aligned.axes[i])
    sides = parts.left, parts.right
    of_weights, of_values = sides[scores.side], sides[1 - scores.side]
    out = aligned.result.dims[:rank]
    found = scores.sum
    return Attention(
        node,
        out,
        rows,
        keys,
        columns=tuple(axis for d in out for axis in d if axis not in rows),
        scores=tuple(_score_of(product, keys, node, trace) for product in aligned.products),
        value=told(of_values, keys, trace),
        masks=tuple(_masks(aligned)),
        sinks=tuple(_sinks(aligned, dim)),
        share=_log_sum_exp(found.numbers),
        strict_rows=not weights.safe and (weights.shares is not None or not (found.sinks or found.numbers)),
        numbers=weights.numbers,
        opaque=_opaque(of_weights.read, aligned, scores.reader, function, dim) if scores.opaque else None,
    )


def _aligned_with(
    reading: Reading | str, scores: Sum, exposed: Form, labels: Sequence[Hashable]
) -> tuple[Aligned, Reading | str]:
    """The scores with the forms of a function of them; without these, and why, if they have no axes in common."""
    if isinstance(reading, str):
        return scores.aligned(exposed, labels, ()), reading
    try:
        return scores.aligned(exposed, labels, reading.forms), reading
    except Unaligned as error:
        return scores.aligned(exposed, labels, ()), f"that {error}"


def _factors(node: fx.Node, output: Term, trace: Trace) -> Product:
    """The attention weights and the values. Raises Refusal if the output is not known to be their product any more."""
    if not isinstance(output.parts, Product):
        reason = "expected the product of attention weights and values to keep its axes, found them cut or merged"
        raise Refusal(node, reason + trace.because(output))
    return output.parts


def _keys_of(probabilities: Read, dim: int, node: fx.Node) -> KeyRange:
    """The keys whose weights are multiplied with values. Raises Refusal unless all weights of these keys are."""
    part = _part(probabilities.dims[dim])
    if part is None:
        raise only_a_part(node)
    return KeyRange(dim, *part)


def _part(digits: Sequence[Digit]) -> tuple[Size, Size] | None:
    """Start and size of the part of a dimension that a read takes; None if it is not one contiguous range."""
    if all(digit.whole for digit in digits):
        return 0, product(digit.extent for digit in digits)
    if len(digits) != 1 or digits[0].step != 1:
        return None
    return digits[0].start, digits[0].axis.size if digits[0].axis is not None else 1


def _summands(weights: Weights, keys: KeyRange, rank: int, trace: Trace, *, zeros: bool) -> tuple[Sum, Weights]:
    """The summands of scores of `rank` dimensions, with no products if they are more than a sum; and the weights.

    `zeros`: what sets weights to 0 after the softmax becomes one of the masks, or merges with the one that it repeats.
    """
    shares = weights.shares
    found = scores_of(weights.scores, keys, trace, weights.factor, shifted=shares is None)
    numbers = [s.what.score for s in found if isinstance(s.what, Number)]
    if shares is not None:
        found += _shared(shares.sinks, rank, keys.dim, weights.factor, trace)
        numbers += shares.numbers
    if weights.seen is not None and zeros:
        found, safe = only_seen(found, weights.seen, weights.node, trace, safe=weights.safe)
        weights = replace(weights, safe=safe)
    products, masks, sinks = ([s for s in found if isinstance(s.what, kind)] for kind in (float, Mask, Sink))
    return Sum(products, masks, sinks, numbers), weights


def _shared(nodes: Sequence[fx.Node], rank: int, dim: int, factor: float, trace: Trace) -> list[Summand]:
    """Sinks of one key each, which broadcast to scores of `rank` dimensions."""
    found = []
    for k, node in enumerate(nodes):
        form = trace[node]
        own = (("share", k) if label == dim else label for label in range(rank - len(form.dims), rank))
        found.append(Summand(form, tuple(own), Sink(form.term, factor)))
    return found


def _tangled(scores: Sum, weights: Weights) -> bool:
    """Whether a mask, a sink or a factor is itself computed from the products."""
    own = derived(scores.products, weights.node)
    beside = [each.form for each in (*scores.masks, *scores.sinks)] + [factor.form for factor in scores.factors]
    return any(node in own for form in beside for node in nodes_of(form.term.read))


def _products_alone(weights: Weights, keys: KeyRange, node: fx.Node, trace: Trace) -> list[Summand]:
    """The products of which scores are a function, whatever it is. Raises Refusal if there are none."""
    if products := products_within(weights.scores, keys, trace):
        return products
    reason = "expected scores that are a sum of products, found "
    if given := inputs_within(weights.scores, trace):
        if (by_function := own_gradients(node, given[0])) is not None:
            raise by_function
        remedy = from_another_graph("the product of queries and keys")
        raise Refusal(node, reason + " and ".join(map(where, given)), remedy, stopped=given[0])
    because = trace.because(trace[weights.scores].term)
    raise Refusal(node, reason + where(weights.scores) + because, stopped=weights.scores)


def _other_reader(weights: Weights, output: fx.Node, trace: Trace, *, of_some_rows: bool) -> fx.Node | None:
    """What reads the weights besides the product with the values, if anything does: the scores then have to exist.

    Two products of which one is of some rows only do not need them for each other: each is an attention of its own.
    """

    def takes_some_rows(product: fx.Node) -> bool:
        reads = [trace[operand].term.read for operand in arguments(product)[:2]]
        return any(read.source is weights.node and is_of_some_rows(read, weights.dim) for read in reads)

    own = {weights.node, *weights.within}
    ends = {output, weights.total, *pieces_of(output, trace)}
    pending, seen = list(own), set(own)
    while pending:
        for user in pending.pop().users:
            if user in ends or user in seen or user.target is aten.sym_size.int:
                continue
            if user.target in PRODUCTS and (of_some_rows or takes_some_rows(user)):
                continue
            if is_tensor(user) and trace[user].term.read.source not in own:
                return user
            if not is_tensor(user) and user.target not in _PARTS:
                return user
            seen.add(user)
            pending.append(user)
    return None


def _score_of(product: AlignedProduct, keys: Dim, node: fx.Node, trace: Trace) -> Score:
    assert isinstance(product.summand.what, float)
    score = _score(node, product.form.term, keys, product.summand.what, trace)
    for form, factor in product.factors:
        score = replace(score, query=times(score.query, form.term.read, divides=factor.divides))
    return score


def _score(node: fx.Node, term: Term, keys: Dim, scale: float, trace: Trace) -> Score:
    parts = term.parts
    if not isinstance(parts, Product):
        reason = "expected the product of queries and keys to keep its axes, found them cut or merged"
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
        raise Refusal(
            node,
            "expected exactly one operand of the scores to have the axis of the keys, found that "
            "both or neither has it",
        )
    return Score(sides[0], told(sides[1], keys, trace), parts.summed, parts.scale * scale)


def _masks(aligned: Aligned) -> Iterator[Mask]:
    for form, summand in aligned.masks:
        assert isinstance(summand.what, Mask)
        yield replace(summand.what, term=form.term)


def _sinks(aligned: Aligned, dim: int) -> Iterator[Sink]:
    for form, summand in aligned.sinks:
        assert isinstance(summand.what, Sink)
        yield replace(summand.what, term=form.term, keys=form.dims[dim])


def _opaque(probabilities: Read, aligned: Aligned, reader: fx.Node | None, reading: Reading | str, dim: int) -> Opaque:
    reads = tuple(product.form.term.read for product in aligned.products)
    function = reading if isinstance(reading, str) else reading.aligned(aligned.function, reads, dim)
    beside = tuple(tuple(form.term for form in product.added) for product in aligned.products)
    return Opaque(probabilities, reads, reader, function, beside)


def _log_sum_exp(numbers: Sequence[float]) -> float:
    greatest = max(numbers, default=-math.inf)
    return greatest + math.log(sum(math.exp(n - greatest) for n in numbers)) if numbers else greatest
