"""Distribute products over sums of attention weights.

Before   o = (softmax(a) - s * softmax(b)) @ v                    differential attention: one product
After    o = softmax(a) @ v - s * (softmax(b) @ v)                two, each an attention

Before   o = (g * softmax(a)) @ v                                 g: a number for each head or query, as a gate
After    o = g * (softmax(a) @ v)

Before   o = (g * softmax(a)) @ v                                 g: a number for each key, whatever the query
After    o = softmax(a) @ (g * v)

Before   o = (w / (w.sum(-1, keepdim=True) + 1e-6)) @ v           w = softmax(a), which add up to 1
After    o = 1 / (1 + 1e-6) * (w @ v)

The softmaxes may be parts of one, as those of even and odd heads. If one of them is not MLA, a second product gains
nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..algebra.sizes import same
from ..algebra.terms import Form
from ..attention.copies import original_of
from ..attention.nearly import SUMS, softmaxes
from ..attention.pieces import PRODUCTS
from ..attention.softmax import more_than_one, weights_of
from ..mla.site import Site
from ..nodes.arguments import arguments, aten, factor_of, is_tensor, is_view
from ..trace.trace import Trace

_SOFTMAXES = {aten._softmax.default, aten._safe_softmax.default}
_CHANGES = {*SUMS, aten.mul.Tensor, aten.div.Tensor}


@dataclass(frozen=True)
class _Addend:
    """`number * weights`, times the tensors `factors`, each of which is the same for all keys, and `of_keys`, each of
    which is the same for all queries."""

    weights: fx.Node
    number: float = 1.0
    factors: tuple[fx.Node, ...] = ()
    of_keys: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class Distributed:
    """The product `place` of a sum of weights, as a sum of products; called with the values of its `sources`."""

    place: fx.Node
    addends: tuple[_Addend, ...]

    @property
    def sources(self) -> list[fx.Node]:
        """The values and, for each addend, the weights and their factors."""
        tensors = [node for each in self.addends for node in (each.weights, *each.of_keys, *each.factors)]
        return [arguments(self.place)[1], *tensors]

    def __call__(self, values: Tensor, *tensors: Tensor) -> Tensor:
        given, total = iter(tensors), None
        for addend in self.addends:
            weights, own = next(given), values
            if addend.of_keys:
                own = values.reshape(*weights.shape[:-2], *values.shape[-2:])
            for _ in addend.of_keys:
                own = own * torch.atleast_2d(next(given)).mT
            product = _merged(weights.to(values.dtype), values.dim()) @ _merged(own.to(values.dtype), values.dim())
            product = product.reshape(*weights.shape[:-1], values.shape[-1]) * addend.number
            for _ in addend.factors:
                product = product * next(given)
            total = product if total is None else total + product
        assert total is not None
        return _merged(total, values.dim()).to(values.dtype)

    def holds(self, added: Container[fx.Node], sites: Sequence[Site]) -> bool:
        """Whether each of its products is that of a site."""
        proved = {site.node for site in sites}
        return all(node in proved for node in self.place.graph.nodes if node in added and node.target in PRODUCTS)


def _merged(tensor: Tensor, dims: int) -> Tensor:
    """A tensor with its first dimensions merged into one, so that `dims` are left, if it has more than these."""
    return tensor.flatten(0, -dims) if tensor.dim() > dims else tensor


def may_be_sum(node: fx.Node) -> bool:
    """Whether a node may be a sum of softmaxes, each of which lies at most a few steps back, or a multiple of one."""

    def leads(operand: Any, steps: int) -> bool:
        if not isinstance(operand, fx.Node) or steps == 0:
            return False
        if isinstance(operand.target, torch._ops.OpOverload) and is_view(operand.target):
            return leads(operand.all_input_nodes[0], steps)
        return operand.target in _SOFTMAXES or any(leads(before, steps - 1) for before in operand.all_input_nodes)

    if node.target in (aten.mul.Tensor, aten.div.Tensor):  # of the weights as they are, or cast: routers take some
        return any(leads(operand, 2) for operand in arguments(node))
    return node.target in SUMS and all(leads(operand, 4) for operand in arguments(node)[:2])


def distributed_in(graph: fx.Graph, trace: Trace) -> Iterator[Distributed]:
    """The products of a graph over sums of attention weights, and over multiples of them."""
    for node in graph.nodes:
        if node.target not in PRODUCTS:
            continue
        operand = arguments(node)[0]
        source = trace.source(operand)
        if source is None or source.target not in _CHANGES or not is_tensor(source):
            continue
        if source.target not in SUMS and weights_of(source, trace) is not None:
            continue
        addends = _together(_addends(source, _Addend(source), trace) or ())
        of_keys = any(addend.of_keys for addend in addends)
        distributed = len(addends) > 1 or of_keys or any(each.factors or each.number != 1.0 for each in addends)
        if of_keys and node.target is not aten.bmm.default:  # the same values for all sequences and heads
            continue
        if distributed and _in_order(trace[operand], trace[source]):
            yield Distributed(node, tuple(addends))


def _in_order(operand: Form, source: Form) -> bool:
    """Whether a tensor has all elements of another in order, and the same sizes in all its dimensions but the first."""
    read = operand.term.read
    if read.factors or not read.whole:
        return False
    if [digit.axis for digit in read.digits] != [axis for dim in operand.dims for axis in dim]:
        return False
    own, last = len(operand.dims), range(1, len(operand.dims))
    return len(source.dims) >= own and all(same(source.shape[-i], operand.shape[-i]) for i in last)


def _addends(node: fx.Node, so_far: _Addend, trace: Trace) -> list[_Addend] | None:
    """The attention weights, all of the tensor's shape, that a tensor is a sum of; None if it is not such a sum."""
    if _is_of_weights(node, trace):
        alike = node.meta["val"].dim() == so_far.weights.meta["val"].dim() and all(
            same(a, b) for a, b in zip(trace[node].shape, trace[so_far.weights].shape, strict=True)
        )
        return [replace(so_far, weights=node)] if alike else None
    original = original_of(node, trace)
    if original is None or original.factors:
        return None
    node = original.node
    a, b = (*arguments(node), None, None)[:2]
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        alpha = factor_of(node)
        if alpha is None or not is_tensor(a) or not is_tensor(b):
            return None
        sign = alpha if node.target is aten.add.Tensor else -alpha
        left = _addends(a, so_far, trace)
        right = _addends(b, replace(so_far, number=so_far.number * sign), trace)
        return None if left is None or right is None else [*left, *right]
    if node.target is aten.div.Tensor:
        divisor = b if isinstance(b, int | float) else more_than_one(node, trace)
        return _addends(a, replace(so_far, number=so_far.number / divisor), trace) if divisor else None
    if node.target is not aten.mul.Tensor:
        return None
    if isinstance(b, int | float):
        return _addends(a, replace(so_far, number=so_far.number * b), trace)
    for weights, factor in ((a, b), (b, a)):
        if not softmaxes(weights, trace):
            continue
        if _is_of_rows(trace[factor]):
            return _addends(weights, replace(so_far, factors=(*so_far.factors, factor)), trace)
        if _is_of_keys(trace[factor]):
            return _addends(weights, replace(so_far, of_keys=(*so_far.of_keys, factor)), trace)
    return None


def _is_of_weights(node: fx.Node, trace: Trace) -> bool:
    """Whether a tensor holds attention weights, perhaps of some rows, with the keys in its last dimension.

    Those of keys without values, such as a sink, may be left out.
    """
    read, last = trace[node].term.read, trace[node].dims[-1:]
    weights = weights_of(read.source, trace)
    if weights is None or read.factors or not last:
        return False
    keys = read.dims[weights.dim]
    in_a_row = all(digit.whole for digit in keys) or (len(keys) == 1 and keys[0].step == 1)
    return in_a_row and tuple(digit.axis for digit in keys) == last[0]


def _together(addends: Sequence[_Addend]) -> list[_Addend]:
    """The addends, with those of the same weights and factors added up."""
    numbers: dict[_Addend, float] = {}
    for addend in addends:
        key = replace(addend, number=1.0)
        numbers[key] = numbers.get(key, 0.0) + addend.number
    return [replace(key, number=number) for key, number in numbers.items()]


def _is_of_rows(factor: Form) -> bool:
    """Whether a tensor is the same for all keys, which are the last dimension."""
    return not factor.dims or not factor.dims[-1]


def _is_of_keys(factor: Form) -> bool:
    """Whether a tensor is the same for all queries, which are the last dimension but one."""
    return len(factor.dims) < 2 or not factor.dims[-2]
