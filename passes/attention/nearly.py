"""Say why a product with what is nearly attention weights is no attention: otherwise no report would mention it.

e / (e.sum() + 1e-6)                     weights that do not add up to 1
softmax(s) * gate                        weights that are multiplied afterwards, as by a dropout
nan_to_num(softmax(s), nan=0.5)          numbers that a softmax does not give
exp(s - maximum(m, s.amax()))            a softmax over blocks of keys, with a running maximum
softmax(s) - 0.5 * softmax(t)            several softmaxes
"""

from __future__ import annotations

import operator
from itertools import islice
from typing import Any

from torch import fx

from ..nodes.arguments import arguments, aten, is_tensor
from ..nodes.refusal import Refusal
from ..nodes.source import where
from ..nodes.walk import makers, walk
from ..trace.trace import Trace
from .copies import original_of
from .pieces import PRODUCTS
from .softmax import divided_by_more, exponent_of, weights_of

SUMS = {aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor}


def nearly_weights(node: fx.Node, trace: Trace) -> Refusal | None:
    """Why a product `node` is no attention though one of its operands is nearly attention weights."""
    sources = filter(None, map(trace.source, arguments(node)[:2]))
    refusals = (refuse(node, source, trace) for source in sources for refuse in _NEARLY)
    return next(filter(None, refusals), None)


def _divided(node: fx.Node, source: fx.Node, trace: Trace) -> Refusal | None:
    """The refusal for weights that were divided by more than their sum."""
    divisor = divided_by_more(source, trace)
    if divisor is None or _routes(arguments(source)[0], trace):
        return None
    reason = f"expected attention weights that add up to 1, found them divided by {where(divisor)}"
    return Refusal(node, reason, "divide by the sum alone: in a softmax it is never 0")


def _with_numbers(node: fx.Node, source: fx.Node, trace: Trace) -> Refusal | None:
    """The refusal for weights in which a number other than 0 replaces NaN."""
    if source.target is not aten.nan_to_num.default or not weights_of(_original(arguments(source)[0], trace), trace):
        return None
    found = f"{where(source)} replaces NaN by a number other than 0"
    reason = f"expected attention weights as a softmax gives them, found that {found}"
    return Refusal(node, reason, "replace NaN by 0, or leave it")


def _by_blocks(node: fx.Node, source: fx.Node, trace: Trace) -> Refusal | None:
    """The refusal for the weights of a block of keys, under a running maximum."""
    greatest = _running(source, trace)
    if greatest is None:
        return None
    reason = "expected a softmax over all keys, found one over blocks of keys, with a running maximum "
    remedy = "take one softmax of all scores: the compiled code divides the keys into blocks itself"
    return Refusal(node, reason + where(greatest), remedy)


def _of_several(node: fx.Node, source: fx.Node, trace: Trace) -> Refusal | None:
    """The refusal for a sum of weights."""
    if source.target not in SUMS or len(softmaxes(source, trace)) < 2:
        return None
    reason = f"expected attention weights of one softmax, found several in {where(source)}"
    return Refusal(node, reason, "multiply each softmax with the values, and add up the results")


def _with_factors(node: fx.Node, source: fx.Node, trace: Trace) -> Refusal | None:
    """The refusal for weights that were multiplied."""
    if not _multiplies(source) or not softmaxes(source, trace) or _routes(source, trace):
        return None
    reason = f"expected attention weights as a softmax gives them, found them multiplied in {where(source)}"
    remedy = "multiply the output by a number for each head or query, or the values by one for each key"
    return Refusal(node, reason, remedy + "; for dropout, call model.eval()")


_NEARLY = (_divided, _with_numbers, _by_blocks, _of_several, _with_factors)

_DEPTH = 4
"""How many steps to look back from a sum for softmaxes: a residual stream is a sum as deep as the model."""


def softmaxes(node: Any, trace: Trace, depth: int = _DEPTH) -> list[fx.Node]:
    """The attention weights that a sum is made of, whatever each is multiplied by; empty if it is no such sum."""
    source = trace.source(node)
    if source is None or depth == 0:
        return []
    if weights_of(source, trace) is not None:
        return [source]
    if source.target in SUMS:
        found = [softmaxes(operand, trace, depth - 1) for operand in arguments(source)[:2]]
        return [each for own in found for each in own] if all(found) else []
    if _multiplies(source):
        factors = arguments(source) if source.target is aten.mul.Tensor else arguments(arguments(source)[0])[:1]
        return next((own for operand in factors if (own := softmaxes(operand, trace, depth - 1))), [])
    return []


def _multiplies(node: fx.Node) -> bool:
    """Whether a tensor is a product, or the first result of a dropout."""
    if node.target is operator.getitem:
        made, index = arguments(node)
        return index == 0 and made.target is aten.native_dropout.default
    return node.target is aten.mul.Tensor


def _routes(node: Any, trace: Trace) -> bool:
    """Whether softmaxes that a tensor is made of have no product a sequence or head: a router's are of a weight."""

    def of_tokens(softmax: fx.Node) -> bool:
        scores = walk([softmax], lambda node: makers(node) if node.target not in PRODUCTS else ())
        return any(node.target in _BATCHED for node in islice(scores, _STEPS))

    found = softmaxes(node, trace)
    return bool(found) and not any(map(of_tokens, found))


_BATCHED = {aten.bmm.default, aten.baddbmm.default}
_STEPS = 32
"""Nodes behind a softmax among which the product of its scores is: past casts, masks, views and functions of them."""


def _running(node: fx.Node, trace: Trace) -> fx.Node | None:
    """The running maximum that is subtracted from the scores of a block before the exponential, if there is one."""
    exponent = exponent_of(node)
    difference = None if exponent is None else _original(exponent[0], trace)
    if difference is None or difference.target is not aten.sub.Tensor:
        return None
    greatest = trace.source(arguments(difference)[1])
    return greatest if greatest is not None and greatest.target is aten.maximum.default else None


def _original(node: Any, trace: Trace) -> fx.Node | None:
    """The tensor that `node` is a copy of, perhaps multiplied by numbers or in another dtype."""
    original = original_of(node, trace) if is_tensor(node) else None
    return original.node if original is not None and is_tensor(original.node) else None
