"""Read what is done to scores before their softmax as a function of each score by itself and of further tensors.

softmax(where(seen, 50 * tanh(q k^T / 50), -inf))  ->  div, tanh, mul, where; of a product and of `seen`
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from ..algebra.sizes import same
from ..algebra.terms import Form, Product, Read, Term, Unread
from ..code.reading import done
from ..nodes.arguments import argument, arguments, aten, is_elementwise, is_tensor
from ..nodes.source import where
from ..nodes.walk import walk
from ..trace.trace import Trace
from .scores import KeyRange, labels_through, without_sinks
from .shift import whole_source, without_shift
from .softmax import Weights
from .summands import Sink, Summand

_LIKE = {aten.zeros_like.default: 0.0, aten.ones_like.default: 1.0, aten.full_like.default: None}
"""Ops that fill a tensor of another one's sizes with one number: that number, or None if it is an argument."""
_NEW = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
"""Ops that fill a tensor with one number and take only its dtype and device from another."""


class _Unreadable(Exception):
    """Raised where what is done to scores is not a function of each score by itself; the message says where."""


@dataclass(frozen=True)
class Value:
    """One of the products, of the operands or of the steps' results, and what was done to it `then` (see `Read`)."""

    kind: Literal["product", "operand", "step"]
    index: int
    then: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class Step:
    """An elementwise op. Its arguments are `Value`s, numbers, and whatever else ops take."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    """Of its result in the graph. What was a tensor without dimensions there may have some here, and promote types
    differently: results are cast to this dtype."""


@dataclass(frozen=True)
class Function:
    """`softmax(factor * result)`, with the scores of `sinks` beside it.

    `operands` are the tensors other than products, over axes of the attention; one that is a number has no axes.
    """

    steps: tuple[Step, ...]
    result: Value
    factor: float
    safe: bool
    """Whether the weights are 0, rather than NaN, where no key is seen."""
    numbers: bool
    """Whether they are 0 wherever they would be NaN."""
    weights_dtype: torch.dtype
    operands: tuple[Term, ...] = ()
    sinks: tuple[Sink, ...] = ()

    def __call__(self, products: Sequence[Tensor], operands: Sequence[Tensor]) -> Tensor:
        """The scores, before `factor`, from products `[B, H, Sq, T]` and operands that broadcast with them."""
        results: list[Tensor] = []

        def given(argument: Any) -> Any:
            if not isinstance(argument, Value):
                return argument
            known = {"product": products, "operand": operands, "step": results}[argument.kind]
            return done(known[argument.index], argument.then)

        for step in self.steps:
            result = step.target(*map(given, step.args), **{key: given(value) for key, value in step.kwargs})
            results.append(result.to(step.dtype))
        scores: Tensor = given(self.result)
        return scores


@dataclass(frozen=True)
class Reading:
    """A function whose operands, sinks and products are still over axes of their own, to be aligned with the scores."""

    function: Function
    operands: tuple[Summand, ...]
    sinks: tuple[Summand, ...]
    uses: tuple[tuple[int, Summand], ...]
    """Every use of a product: the product's index, and its form there."""

    @property
    def forms(self) -> list[Summand]:
        """All forms that are to be aligned."""
        return [*self.operands, *self.sinks, *(use for _, use in self.uses)]

    def aligned(self, forms: Sequence[Form], products: Sequence[Read], dim: int) -> Function | str:
        """The function over common axes, or why there is none, given `self.forms` and the products over these axes."""
        count, end = len(self.operands), len(self.operands) + len(self.sinks)
        for form in forms[:end]:
            if isinstance(form.term.read.source, Unread):
                return "a tensor that the graph does not hold"
        for (index, _), form in zip(self.uses, forms[end:], strict=True):
            if form.term.read.dims != products[index].dims:
                return "scores that are used at other positions too"
        sinks = []
        for use, form in zip(self.sinks, forms[count:end], strict=True):
            assert isinstance(use.what, Sink)
            sinks.append(replace(use.what, term=form.term, keys=form.dims[dim]))
        return replace(self.function, operands=tuple(form.term for form in forms[:count]), sinks=tuple(sinks))


def read_function(products: Sequence[Summand], keys: KeyRange, weights: Weights, trace: Trace) -> Reading | str:
    """What is done to `products` on the way to `weights`, or why it is not a function of each score by itself."""
    try:
        return _read(products, keys, weights, trace)
    except _Unreadable as error:
        return str(error)


def _read(products: Sequence[Summand], keys: KeyRange, weights: Weights, trace: Trace) -> Reading:
    node, factor = without_shift(weights.scores, keys.dim, trace)
    labels = tuple(range(len(trace[node].dims)))
    builder = _Builder(products, weights.node, trace)
    sinks: list[Summand] = []
    if not same(keys.size, trace[node].shape[keys.dim]):
        source, scale = whole_source(node, trace)
        if source is None or source.target is not aten.cat.default or argument(source, "dim") % len(labels) != keys.dim:
            raise _Unreadable(f"a part of {where(node)}")
        factor *= scale
        piece, sinks = without_sinks(source, keys, labels, 1.0, trace)
        if piece is None:
            raise _Unreadable(f"a part of {where(source)}")
        node = piece
    result = builder.value(node, labels)
    dtype = weights.node.meta["val"].dtype
    function = Function(tuple(builder.steps), result, factor * weights.factor, weights.safe, weights.numbers, dtype)
    return Reading(function, tuple(builder.operands), tuple(sinks), tuple(builder.uses))


class _Builder:
    """Walks from the scores back to the products, and collects steps, operands and uses of products on the way."""

    def __init__(self, products: Sequence[Summand], weights: fx.Node, trace: Trace) -> None:
        self.trace = trace
        self.steps: list[Step] = []
        self.operands: list[Summand] = []
        self.uses: list[tuple[int, Summand]] = []
        self._products = {product.form.term.read.source: i for i, product in enumerate(products)}
        self._derived = derived(products, weights)
        self._known: dict[tuple[fx.Node, tuple[int, ...]], Value] = {}

    def value(self, node: fx.Node, labels: tuple[int, ...]) -> Value:
        """The value of a tensor whose dimensions are the dimensions `labels` of the scores."""
        if node not in self._derived and not self._is_like_scores(node):
            return self._operand(node, labels)
        form = self.trace[node]
        source, then = form.term.read.source, form.term.read.then
        if source in self._products and isinstance(form.term.parts, Product):
            self.uses.append((self._products[source], Summand(form, labels, 1.0)))
            return Value("product", self._products[source], then)
        through = labels_through(form, labels)
        if not isinstance(source, fx.Node) or through is None or source.op != "call_function":
            raise _Unreadable(f"a part of {where(node)}")
        if (source, through) not in self._known:
            step = self._step(source, through)
            self.steps.append(step)
            self._known[source, through] = Value("step", len(self.steps) - 1)
        return replace(self._known[source, through], then=then)

    def _step(self, node: fx.Node, labels: tuple[int, ...]) -> Step:
        def given(argument: Any) -> Any:
            if not isinstance(argument, fx.Node):
                return argument
            if not is_tensor(argument):
                raise _Unreadable(f"an operation with a symbolic size, {where(node)}")
            return self.value(argument, labels[len(labels) - len(self.trace[argument].dims) :])

        dtype = node.meta["val"].dtype
        if node.target in _LIKE:
            like, *numbers = arguments(node)[:2]
            number = numbers[0] if node.target is aten.full_like.default else _LIKE[node.target]
            return Step(aten.full_like.default, (given(like), number), (), dtype)
        if not is_elementwise(node):
            raise _Unreadable(where(node))
        args = tuple(map(given, node.args))
        return Step(node.target, args, tuple((key, given(value)) for key, value in node.kwargs.items()), dtype)

    def _is_like_scores(self, node: fx.Node) -> bool:
        """Whether a node is a number wherever there is a score, or what is made of one."""
        return node.target in _LIKE and arguments(node)[0] in self._derived

    def _operand(self, node: fx.Node, labels: tuple[int, ...]) -> Value:
        form = self.trace[node]
        self.operands.append(Summand(form, labels, 1.0))
        return Value("operand", len(self.operands) - 1)


def derived(products: Sequence[Summand], weights: fx.Node) -> set[Hashable]:
    """The products and everything that is computed from them, up to the weights, but not from their sizes alone."""
    sources = [product.form.term.read.source for product in products]
    nodes = [source for source in sources if isinstance(source, fx.Node)]
    ends = {*_LIKE, *_NEW}

    def onward(node: fx.Node) -> Iterator[fx.Node]:
        return (user for user in node.users if user is not weights and user.target not in ends)

    return {*sources, *walk(nodes, onward)}
