"""Read attention whose softmax is written by hand: `softmax(scores) @ value`, whose scores may be a sum of products.

softmax((q k^T + q2 k2^T) * scale + mask) @ v      its products and masks, over common axes
softmax(50 * tanh(q k^T / 50)) @ v                 its product, and the function of it whose softmax is taken
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from torch import fx

from ..algebra import operations
from ..algebra.sizes import Size, Unaligned, product
from ..algebra.terms import Digit, Dim, Form, Product, Read, Term
from ..code.reading import nodes_of
from ..nodes.arguments import arguments, aten, is_tensor
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
from .some_rows import in_rows, is_of_some_rows
from .summands import Factor, Mask, Number, Sink, Summand
from .told import told
from .within import inputs_within, products_within
from .zeroed import only_seen, set_to_zero

_PARTS = SPLITS | UNBINDS
"""Ops that give several parts of a tensor."""


@dataclass(frozen=True)
class _Sum:
    """The summands of scores, by kind; only the products where scores are more than a sum."""

    products: Sequence[Summand]
    masks: Sequence[Summand] = ()
    sinks: Sequence[Summand] = ()
    numbers: Sequence[float] = ()

    @property
    def factors(self) -> list[Factor]:
        return [factor for summand in self.products for factor in summand.factors]

    def in_rows(self, weights: Read, keys: int) -> _Sum:
        """The same in those rows that a read of weights takes, whose keys are dimension `keys`."""
        groups = self.products, self.masks, self.sinks
        products, masks, sinks = ([in_rows(each, weights, keys) for each in group] for group in groups)
        return _Sum(products, masks, sinks, self.numbers)

    def aligned(self, exposed: Form, dims: Sequence[Hashable], function: Sequence[Summand]) -> _Aligned:
        """All of them, `exposed` (with labels `dims` for its dimensions) and a `function`'s forms, over common axes.

        Raises:
            Unaligned: if there are no such axes.
        """
        added = [replace(summand, form=form, added=()) for summand in self.products for form in summand.added]
        of_scores = self.products, self.masks, self.sinks
        groups: list[Sequence[Summand | Factor]] = [*of_scores, self.factors, added, function]
        operands = [operand for group in groups for operand in group]
        forms, axes = operations.align(
            [exposed, *(operand.form for operand in operands)], [dims, *(operand.labels for operand in operands)]
        )
        rest = iter(forms)
        return _Aligned(axes, next(rest), *(list(islice(rest, len(group))) for group in groups))


@dataclass(frozen=True)
class _Aligned:
    """Forms over common axes: of the product with the values, and of what scores are made of, in `_Sum`'s order."""

    axes: dict[Hashable, Dim]
    result: Form
    products: list[Form]
    masks: list[Form]
    sinks: list[Form]
    factors: list[Form]
    added: list[Form]
    function: list[Form]


def from_weights(
    node: fx.Node, output: Form, side: int, weights: Weights, trace: Trace, whole: str | None = None
) -> Attention:
    """The attention that ends in `node`.

    `output` is the form of its product with the values, perhaps before a division by the sum; operand `side` of the
    product holds the weights. `whole`, if given, is why the scores of all heads have to be computed at once if they are
    more than a sum.

    Raises:
        Refusal: if the code is another function of queries, keys and values than attention.
        Unaligned: if queries, keys and values have no axes in common.
    """
    dim, place = weights.dim, output.term.read.source
    parts = _factors(node, output.term, trace)
    probabilities = (parts.left, parts.right)[side].read
    key_range = _keys_of(probabilities, dim, node)
    assert isinstance(place, fx.Node)
    some = is_of_some_rows(probabilities, dim)
    reader = _other_reader(weights, place, trace, of_some_rows=some)
    score_dims = [tuple(d.axis for d in digits if d.axis is not None) for digits in probabilities.dims]
    scores, weights = _summands(weights, key_range, len(score_dims), trace, zeros=reader is None)
    opaque = reader is not None or not scores.products or _tangled(scores, weights)
    if some and opaque:
        raise only_a_part(node)
    if some:
        scores = scores.in_rows(probabilities, dim)
    if opaque:
        if weights.seen is not None and reader is None:
            raise set_to_zero(weights.node)
        scores = _Sum(_products_alone(weights, key_range, node, trace))
        if place is not node:  # the division comes later and stays: the attention ends in the product
            return from_weights(
                place,
                trace[place],
                side,
                weights,
                trace,
                f"weights that {where(node)} divides only after their product with the values",
            )
    reading: Reading | str = whole or ""
    if opaque and weights.shares is not None:
        reading = f"a softmax with a further term in its divisor, in {where(weights.node)}"
    elif opaque and whole is None and reader is None:
        reading = read_function(scores.products, key_range, weights, trace)
    exposed = Form((*output.dims, *score_dims), output.term)
    labels = [*(("out", i) for i in range(len(output.dims))), *range(len(score_dims))]
    aligned, reading = _aligned_with(reading, scores, exposed, labels)
    parts = _factors(node, aligned.result.term, trace)
    keys = aligned.axes[dim]
    if parts.summed != keys:
        reason = "expected the values to be summed over the keys of the softmax, found another axis"
        raise Refusal(node, reason, "take the softmax over the keys, and do not mix the weights of heads after it")
    rows = tuple(axis for i in range(len(score_dims)) if i != dim for axis in aligned.axes[i])
    dims = aligned.result.dims[: len(output.dims)]
    return Attention(
        node,
        dims,
        rows,
        keys,
        columns=tuple(axis for d in dims for axis in d if axis not in rows),
        scores=tuple(_scores(scores, aligned, keys, node, trace)),
        value=told((parts.right, parts.left)[side], keys, trace),
        masks=tuple(_masks(scores, aligned)),
        sinks=tuple(_sinks(scores, aligned, dim)),
        share=_log_sum_exp(scores.numbers),
        strict_rows=not weights.safe and (weights.shares is not None or not (scores.sinks or scores.numbers)),
        numbers=weights.numbers,
        opaque=_opaque((parts.left, parts.right)[side].read, scores, aligned, reader, reading, dim) if opaque else None,
    )


def _aligned_with(
    reading: Reading | str, scores: _Sum, exposed: Form, labels: Sequence[Hashable]
) -> tuple[_Aligned, Reading | str]:
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


def _summands(weights: Weights, keys: KeyRange, rank: int, trace: Trace, *, zeros: bool) -> tuple[_Sum, Weights]:
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
    return _Sum(products, masks, sinks, numbers), weights


def _shared(nodes: Sequence[fx.Node], rank: int, dim: int, factor: float, trace: Trace) -> list[Summand]:
    """Sinks of one key each, which broadcast to scores of `rank` dimensions."""
    found = []
    for k, node in enumerate(nodes):
        form = trace[node]
        own = (("share", k) if label == dim else label for label in range(rank - len(form.dims), rank))
        found.append(Summand(form, tuple(own), Sink(form.term, factor)))
    return found


def _tangled(scores: _Sum, weights: Weights) -> bool:
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


def _scores(scores: _Sum, aligned: _Aligned, keys: Dim, node: fx.Node, trace: Trace) -> Iterator[Score]:
    factors = iter(aligned.factors)
    for form, summand in zip(aligned.products, scores.products, strict=True):
        assert isinstance(summand.what, float)
        score = _score(node, form.term, keys, summand.what, trace)
        for factor in summand.factors:
            score = replace(score, query=times(score.query, next(factors).term.read, divides=factor.divides))
        yield score


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


def _masks(scores: _Sum, aligned: _Aligned) -> Iterator[Mask]:
    for form, summand in zip(aligned.masks, scores.masks, strict=True):
        assert isinstance(summand.what, Mask)
        yield replace(summand.what, term=form.term)


def _sinks(scores: _Sum, aligned: _Aligned, dim: int) -> Iterator[Sink]:
    for form, summand in zip(aligned.sinks, scores.sinks, strict=True):
        assert isinstance(summand.what, Sink)
        yield replace(summand.what, term=form.term, keys=form.dims[dim])


def _opaque(
    probabilities: Read, scores: _Sum, aligned: _Aligned, reader: fx.Node | None, reading: Reading | str, dim: int
) -> Opaque:
    reads = tuple(form.term.read for form in aligned.products)
    function = reading if isinstance(reading, str) else reading.aligned(aligned.function, reads, dim)
    added = iter(aligned.added)
    beside = tuple(tuple(form.term for form in islice(added, len(s.added))) for s in scores.products)
    return Opaque(probabilities, reads, reader, function, beside)


def _log_sum_exp(numbers: Sequence[float]) -> float:
    greatest = max(numbers, default=-math.inf)
    return greatest + math.log(sum(math.exp(n - greatest) for n in numbers)) if numbers else greatest
