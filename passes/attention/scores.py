"""Take apart scores written by hand: products of queries and keys with their scales, masks, and sinks.

softmax(where(seen, (q k^T + q2 k2^T) * scale + bias, -inf))  ->  two products, one bias, one bool mask
softmax(cat(q k^T, sink))[..., :-1]                           ->  one product, one sink
softmax(cat(s[..., :n], s[..., n:] + bias)),  s = q k^T       ->  one product, one bias
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from mla_compile.score_spacing import lost_below, lost_in_ops

from ..algebra import operations
from ..algebra.factored import factored
from ..algebra.sizes import Size, Unaligned, same, total
from ..algebra.terms import Axis, Form, Join, Product, Sum
from ..nodes.arguments import argument, arguments, aten, factor_of, is_tensor
from ..nodes.constants import constant_of, number_in
from ..nodes.positive import is_positive
from ..nodes.refusal import Refusal
from ..trace.trace import Trace
from .parts_of_keys import side_by_side
from .shift import whole_source, without_shift
from .summands import Factor, Mask, Number, Sink, Summand

HIDES = -1e4
"""The number that code in the manner of BERT puts in the place of scores. Such keys have no weight in a row that has a
score of usual size; in a row that has none, what is left of their scores counts (see `_hidden_alike`)."""
_VANISHES = -300.0
"""Such a number, times a scale that is applied after it, is at most this: its `exp` is far less than any rounding of
the weights."""
ALL_ALIKE = -1e30
"""Added to any score this gives the number itself: its neighbours are 7e22 apart in float32, 1e14 in float64."""


@dataclass(frozen=True)
class KeyRange:
    """The keys of a score tensor that have values: `size` of them along dimension `dim`, from `start` on."""

    dim: int
    start: Size
    size: Size


def scores_of(
    node: fx.Node, keys: KeyRange, trace: Trace, times: float = 1.0, *, shifted: bool = True
) -> list[Summand]:
    """The summands of a score tensor `times` a number; masks in the order in which they apply.

    Whatever is no product is an additive mask. What is subtracted from all scores of a row is left out if `shifted`.

    Raises:
        Refusal: if the scores of keys without values do not stand apart from those of keys with values.
    """
    lowest = times * torch.finfo(node.meta["val"].dtype).min
    node, factor = without_shift(node, keys.dim, trace) if shifted else (node, 1.0)
    factor *= times
    labels = tuple(range(len(trace[node].dims)))
    if same(keys.size, trace[node].shape[keys.dim]):
        return _whole_summands(node, labels, factor, keys.dim, lowest, trace)
    source, scale = whole_source(node, trace)
    if source is not None and (padded := _padded(source, keys, labels, factor * scale, lowest, trace)) is not None:
        return padded
    if source is None or source.target is not aten.cat.default:
        raise only_a_part(node)
    return _joined(source, keys, labels, factor * scale, lowest, trace)


def only_a_part(node: fx.Node) -> Refusal:
    """The refusal for weights of which only some are multiplied with values."""
    reason = "expected all attention weights to be multiplied with the values, found that only a part of them is"
    return Refusal(node, reason, "multiply the whole result of the softmax with the values")


def _joined(
    node: fx.Node, keys: KeyRange, labels: tuple[int, ...], factor: float, lowest: float, trace: Trace
) -> list[Summand]:
    """The summands of the scores with values, which are one piece of the join `node`; the other pieces are sinks."""
    piece, sinks = without_sinks(node, keys, labels, factor, trace)
    if argument(node, "dim") % len(labels) != keys.dim or piece is None:
        raise Refusal(
            node,
            "expected the scores of the keys that have values to be one piece of a join over "
            "keys, found another part of it",
        )
    return [*_whole_summands(piece, labels, factor, keys.dim, lowest, trace), *sinks]


def without_sinks(
    join: fx.Node, keys: KeyRange, labels: tuple[int, ...], factor: float, trace: Trace
) -> tuple[fx.Node | None, list[Summand]]:
    """The piece of joined scores that has values, None if there is none, and the others as sinks, times `factor`."""
    start: Size = 0
    found: fx.Node | None = None
    sinks: list[Summand] = []
    for k, piece in enumerate(arguments(join)[0]):
        form = trace[piece]
        size = form.shape[keys.dim]
        if same(start, keys.start) and same(size, keys.size):
            found = piece
        else:
            own = tuple(("sink", k) if label == keys.dim else label for label in labels)
            sinks.append(Summand(form, own, Sink(form.term, factor)))
        start = total([start, size])
    return found, sinks


def _padded(
    node: fx.Node, keys: KeyRange, labels: tuple[int, ...], factor: float, lowest: float, trace: Trace
) -> list[Summand] | None:
    """The summands of scores that `node` pads with a number, the score of keys without values; None if it does not."""
    if node.target is not aten.constant_pad_nd.default:
        return None
    scores, widths, number = (*arguments(node), 0)[:3]
    place = 2 * (len(labels) - 1 - keys.dim)  # widths begin with those of the last dimension
    beside, score = widths[place : place + 2], number * factor
    known = len(beside) == 2 and all(isinstance(width, int) for width in widths) and min(beside) >= 0
    if not known or sum(beside) == 0 or sum(map(abs, widths)) != sum(beside) or not math.isfinite(score):
        return None
    if not same(beside[0], keys.start) or not same(trace[scores].shape[keys.dim], keys.size):
        return None
    own = Number(score + math.log(sum(beside)))
    return [*_whole_summands(scores, labels, factor, keys.dim, lowest, trace), Summand(trace[scores], labels, own)]


def _whole_summands(
    node: fx.Node, labels: tuple[int, ...], factor: float, key: int, lowest: float, trace: Trace
) -> list[Summand]:
    """The summands of scores that all have values; one additive mask where they are more than a sum."""
    found = [_held(summand, lowest) for summand in _summands(trace[node], labels, factor, key, trace)]
    whole = Mask(trace[node].term, attends=False, factor=factor, lowest=lowest)
    return _hidden_alike(found, highest_fill(node)) or [Summand(trace[node], labels, whole)]


def _held(summand: Summand, lowest: float) -> Summand:
    """A summand whose mask knows what is -inf to the softmax. The number that replaces scores is held already."""
    match summand.what:
        case Mask(attends=True) as mask:
            return replace(summand, what=replace(mask, fill=replace(mask, lowest=lowest).held(mask.fill)))
        case Mask() as mask:
            return replace(summand, what=replace(mask, lowest=lowest))
    return summand


def _hidden_alike(summands: list[Summand], highest: float) -> list[Summand]:
    """Summands in which every number that replaces scores leaves nothing of them; empty where that cannot be had.

    A number like -10,000 is not low enough to be added to scores instead: in a row that is hidden everywhere, not all
    keys would weigh the same. If it is the only one and nothing is added to scores, a far lower one does the same.
    """
    masks = [s.what for s in summands if isinstance(s.what, Mask)]
    fills = {mask.fill for mask in masks if mask.attends and not math.isinf(mask.fill)}
    if all(fill <= highest for fill in fills):
        return summands
    if len(fills) > 1 or not all(mask.attends for mask in masks):
        return []
    return [
        replace(s, what=replace(s.what, fill=min(s.what.fill, ALL_ALIKE)))
        if isinstance(s.what, Mask) and not math.isinf(s.what.fill)
        else s
        for s in summands
    ]


def _summands(form: Form, labels: tuple[int, ...], factor: float, key: int, trace: Trace) -> list[Summand]:
    """The summands of scores whose dimensions are `labels`, `key` being that of the keys, times `factor`."""
    form = replace(form, term=factored(form.term))
    if isinstance(form.term.parts, Product):
        return [Summand(form, labels, factor)]
    source = form.term.read.source
    through = labels_through(form, labels)
    added = isinstance(source, fx.Node) and source.target in (aten.add.Tensor, aten.sub.Tensor)
    if isinstance(form.term.parts, Sum) and not (added and through is not None):
        return [_term_of_sum(replace(form, term=term), labels, factor) for term in form.term.parts.terms]
    found: list[Summand] = []
    if isinstance(source, fx.Node) and source.op == "call_function":
        factor_of_op = factor * math.prod(form.term.read.factors)
        if through is not None:
            found = _Op(source, through, factor_of_op, key, trace).summands()
        elif _keeps_order(form):
            with contextlib.suppress(Unaligned):
                found = _Op(source, labels, factor_of_op, key, trace, form.shape).summands()
    return found or [Summand(form, labels, Mask(form.term, attends=False, factor=factor))]


@dataclass(frozen=True)
class _Op:
    """The op `node` whose result, times `factor`, is scores; its dimensions are `labels`, `key` that of the keys."""

    node: fx.Node
    labels: tuple[int, ...]
    factor: float
    key: int
    trace: Trace
    shape: Sequence[Size] | None = None
    """That of the scores, where they are a view of the result with other dimensions."""

    def summands(self) -> list[Summand]:
        """The summands of its operands; empty if its result is another function of these than a sum with masks."""
        a, b = (*arguments(self.node), None, None)[:2]
        number = number_in(b)
        match self.node.target:
            case aten.add.Tensor | aten.sub.Tensor if is_tensor(a) and is_tensor(b):
                return self._added(a, b)
            case aten.mul.Tensor | aten.mul.Scalar if number is not None:
                return self._operand(a, self.factor * number)
            case aten.div.Tensor | aten.div.Scalar if number:
                return self._operand(a, self.factor / number)
            case aten.mul.Tensor if is_tensor(a) and is_tensor(b):
                return self._times(a, b) or self._times(b, a)
            case aten.div.Tensor if is_tensor(a) and is_tensor(b):
                return self._times(a, b)
        return self._filled() or self._joined()

    def _operand(self, node: fx.Node, factor: float) -> list[Summand]:
        form = self._form(node)
        return _summands(form, self._labels_of(form), factor, self.key, self.trace)

    def _form(self, node: fx.Node) -> Form:
        """The form of an operand, or of the result, over the dimensions of the scores."""
        form = self.trace[node]
        if self.shape is None:
            return form
        return operations.view(operations.expand(form, self.trace[self.node].shape), self.shape)

    def _labels_of(self, form: Form) -> tuple[int, ...]:
        """The labels of an operand that is broadcast to the result."""
        return self.labels[len(self.labels) - len(form.dims) :]

    def _added(self, a: fx.Node, b: fx.Node) -> list[Summand]:
        alpha = factor_of(self.node)
        if alpha is None:
            return []
        sign = alpha if self.node.target is aten.add.Tensor else -alpha
        return _sum(self.node, self._addend(a, self.factor), self._addend(b, sign * self.factor))

    def _addend(self, node: fx.Node, factor: float) -> list[Summand]:
        """The summands of an operand of a sum. One without products is one mask: it rejects keys by what it adds."""
        summands = self._operand(node, factor)
        if _holds_product(summands):
            return summands
        form = self._form(node)
        dtype = self.node.meta["val"].dtype
        highest = abs(self.factor) * min(lost_below(dtype), HIDES) if dtype.is_floating_point else None
        mask = Mask(form.term, attends=False, factor=factor, highest=highest)
        return [Summand(form, self._labels_of(form), mask)]

    def _times(self, node: fx.Node, by: fx.Node) -> list[Summand]:
        """The products in `node` times a tensor that is the same for all keys; empty if it is not, or there is more.

        Scores that are -inf stay it, if the tensor is positive.
        """
        summands, form = self._operand(node, self.factor), self._form(by)
        own = self._labels_of(form)
        of_keys = self.key in own and not form.term.axes.isdisjoint(form.dims[own.index(self.key)])
        products = [s for s in summands if isinstance(s.what, float)]
        hidden = [s for s in summands if isinstance(s.what, Mask) and s.what.attends and s.what.fill == -math.inf]
        if of_keys or len(products) + len(hidden) < len(summands) or (hidden and not is_positive(by)):
            return []
        by_tensor = Factor(form, own, divides=self.node.target is aten.div.Tensor)
        return [*(replace(s, factors=(*s.factors, by_tensor)) for s in products), *hidden]

    def _filled(self) -> list[Summand]:
        """The summands of scores some of which become a number, and the mask that rejects these; empty if the number
        leaves something of them."""
        a, b, c = (*arguments(self.node), None, None, None)[:3]
        by_index = None
        match self.node.target:
            case aten.masked_fill.Scalar | aten.masked_fill.Tensor:
                scores, mask, fill, inverted = a, b, constant_of(c), True
            case aten.where.self if is_tensor(b) and constant_of(c) is not None:
                scores, mask, fill, inverted = b, a, constant_of(c), False
            case aten.where.self if is_tensor(c) and constant_of(b) is not None:
                scores, mask, fill, inverted = c, a, constant_of(b), True
            case aten.index_put.default if self.shape is None and (by_index := filled_by_index(self.node)) is not None:
                scores, (mask, fill), inverted = a, by_index, True
            case _:
                return []
        if fill is None or not is_tensor(scores):
            return []
        if self.factor <= 0 or fill > HIDES or fill * self.factor > _VANISHES:
            return []
        form = self._form(mask)
        own = self._labels_of(form) if by_index is None else self.labels[: len(form.dims)]
        rejected = Mask(form.term, attends=True, fill=fill * self.factor, inverted=inverted)
        return [*self._operand(scores, self.factor), Summand(form, own, rejected)]

    def _joined(self) -> list[Summand]:
        """The summands of scores that are joined of those of parts of the keys, as by a write to the last of them;
        empty if they are not the same for all parts but for masks."""
        form = self._form(self.node)
        join = form.term.parts or form.term.joined
        if not isinstance(join, Join) or self.key not in self.labels:
            return []
        place = self.labels.index(self.key)
        before, along, after = form.dims[:place], form.dims[place], form.dims[place + 1 :]
        if along != (join.axis,):
            return []
        parts = [Form((*before, segment.axes, *after), segment.term) for segment in join.segments]
        found = [_summands(part, self.labels, self.factor, self.key, self.trace) for part in parts]
        return side_by_side(found, [segment.size for segment in join.segments], self.labels, self.key, self.trace)


def filled_by_index(node: fx.Node) -> tuple[fx.Node, float] | None:
    """The mask and the number of `scores[mask] = number`, where the mask is over the first dimensions."""
    _, indices, number, accumulate = (*arguments(node), False)[:4]
    fill = constant_of(number)
    if accumulate or fill is None or len(indices) != 1 or indices[0].meta["val"].dtype != torch.bool:
        return None
    return indices[0], fill


def _term_of_sum(form: Form, labels: tuple[int, ...], factor: float) -> Summand:
    """A term of scores that one op multiplies and adds, as `baddbmm` does, or of a sum later divided into heads."""
    product = isinstance(form.term.parts, Product)
    return Summand(form, labels, factor if product else Mask(form.term, attends=False, factor=factor))


def _sum(source: fx.Node, left: list[Summand], right: list[Summand]) -> list[Summand]:
    """Both operands' summands, those of the one with products first: its masks apply before the rest is added."""
    fills = [s.what for s in (*left, *right) if isinstance(s.what, Mask) and s.what.attends]
    if _holds_product(left) and _holds_product(right) and any(not math.isinf(mask.fill) for mask in fills):
        raise Refusal(
            source,
            "expected scores to be summed before a mask replaces some by a finite number, found them summed afterwards",
        )
    return [*left, *right] if _holds_product(left) else [*right, *left]


def _holds_product(summands: list[Summand]) -> bool:
    return any(isinstance(s.what, float) for s in summands)


def highest_fill(node: fx.Node) -> float:
    """The greatest number that leaves nothing of a score of a node's dtype to which ops add it."""
    return lost_in_ops(node.meta["val"].dtype)


def _keeps_order(form: Form) -> bool:
    """Whether a form reads all of its source in order: only dimensions may be divided or merged."""
    read = form.term.read
    counted = [digit.axis for digits in read.dims for digit in digits if digit.axis is not None]
    return read.whole and counted == [axis for dim in form.dims for axis in dim]


def labels_through(form: Form, labels: tuple[int, ...]) -> tuple[int, ...] | None:
    """The labels of the dimensions of a form's source, perhaps reordered; None unless the form reads all of it."""
    read = form.term.read
    if not read.whole:
        return None
    by_axis: dict[tuple[Axis, ...], int] = {dim: label for dim, label in zip(form.dims, labels, strict=True) if dim}
    spare = [label for dim, label in zip(form.dims, labels, strict=True) if not dim]
    through = []
    for digits in read.dims:
        axes = tuple(digit.axis for digit in digits if digit.axis is not None)
        if axes in by_axis:
            through.append(by_axis.pop(axes))
        elif not axes and spare:
            through.append(spare.pop(0))
        else:
            return None
    return None if by_axis else tuple(through)
