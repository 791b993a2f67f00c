"""Recognise attention weights, however the softmax is spelled.

    softmax(s), exp(log_softmax(s)), exp(s - logsumexp(s))     one op, or its logarithm undone
    e = exp(s);  e / e.sum(),  e * (1 / e.sum())               by hand
    e = exp(s);  (e @ v) / e.sum()                             by hand, divided after the product with the values
    e = exp2(s), 2**s                                          of scores times log 2
    e / max(e.sum(), 1e-20)                                    bounded by less than it is in a row with keys
    w / w.sum(),  w / max(w.sum(), 1e-9)                       divided by their own sum, which is 1
    e / (1 + e.sum())                                          with a share for keys without values (see `shares`)
    nan_to_num(w), where(seen, w, 0)                           with some of them set to 0 (see `zeroed`)

A shift that is subtracted from all scores of a row before the exponential belongs to the scores (see `scores`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..algebra import operations
from ..algebra.factored import factored
from ..algebra.terms import Dim, Form, Product, Read
from ..nodes.arguments import arguments, aten, is_tensor
from ..nodes.constants import constant_of
from ..nodes.walk import makers, walk
from ..trace.trace import Trace
from .copies import copied
from .finite import before_finite
from .shares import Shares, above_least, added_to, lost_beside_one, reaches_one, shares_of
from .zeroed import Seen, zeroed


@dataclass(frozen=True)
class Weights:
    """`node` holds the softmax of `factor * scores` over dimension `dim`, or, where there is a `total`, only its
    numerator, which is divided by that later."""

    node: fx.Node
    scores: fx.Node
    dim: int
    total: fx.Node | None = None
    factor: float = 1.0
    safe: bool = False
    """Whether they are 0, rather than NaN, where no key is seen."""
    numbers: bool = False
    """Whether they are 0 wherever the softmax is NaN, for whatever reason."""
    seen: Seen | None = None
    """Where they were kept, if the others were set to 0 after the softmax."""
    within: tuple[fx.Node, ...] = ()
    """Nodes that hold earlier stages of the weights, or that are made of them to say which to set to 0."""
    shares: Shares | None = None
    """What else was added to the sum that divides; no shift may then be taken off `scores`."""


def weights_of(node: Any, trace: Trace) -> Weights | None:
    """The attention weights that a node holds; None if it holds none."""
    if not isinstance(node, fx.Node) or not is_tensor(node):
        return None
    rank = len(trace[node].dims)
    match node.target:
        case aten._softmax.default:
            return Weights(node, arguments(node)[0], arguments(node)[1] % rank)
        case aten._safe_softmax.default:
            return Weights(node, arguments(node)[0], arguments(node)[1] % rank, safe=True)
        case aten.exp.default:
            return _exponential(node, trace)
        case aten.div.Tensor:
            numerator, total = arguments(node)[:2]
            return _divided(node, numerator, total, trace)
        case aten.mul.Tensor:
            a, b = arguments(node)[:2]
            for numerator, factor in ((a, b), (b, a)):
                total = _inverted(factor, trace)
                weights = None if total is None else _divided(node, numerator, total, trace)
                if weights is not None:
                    return weights
    return _with_zeros(node, trace)


def _with_zeros(node: fx.Node, trace: Trace) -> Weights | None:
    """Weights some of which were set to 0."""
    found = zeroed(node, trace)
    weights = weights_of(found.of, trace) if found is not None else None
    if found is None or weights is None or (weights.seen is not None and found.seen is not None):
        return None
    within = (*weights.within, weights.node, *found.between)
    numbers = weights.numbers or found.seen is None
    return replace(
        weights,
        node=node,
        safe=weights.safe or numbers,
        numbers=numbers,
        seen=found.seen or weights.seen,
        within=within,
    )


def _divided(node: fx.Node, numerator: Any, total: Any, trace: Trace) -> Weights | None:
    """Weights that are an exponential divided by its sum."""
    source = copied(numerator, trace)
    while is_tensor(total) and total.target is aten.expand.default:
        total = arguments(total)[0]
    if source is None or not is_tensor(total):
        return None
    dim = _summed_dim(total, source, trace)
    if dim is None:
        parts = node, numerator, source, total, trace
        return _divided_by_bounded(*parts) or _shared(*parts) or _divided_by_one(*parts)
    if not _spans(trace[total], trace[numerator], dim):
        return None
    if (exponent := exponent_of(source)) is not None:
        return Weights(node, exponent[0], dim, factor=exponent[1])
    if (again := _divided_by_one(node, numerator, source, total, trace)) is not None:
        return again
    found = zeroed(source, trace)
    if found is None or found.seen is None:
        return None
    summed = trace.source(total)
    assert summed is not None
    seen, within = replace(found.seen, renormed=True), (found.of, source, summed)
    if (exponent := exponent_of(found.of)) is not None:
        return Weights(node, exponent[0], dim, factor=exponent[1], seen=seen, within=within)
    weights = weights_of(found.of, trace)
    if weights is None or weights.seen is not None or weights.safe or weights.dim != dim:
        return None
    return replace(weights, node=node, seen=seen, within=(*weights.within, *within))


@dataclass(frozen=True)
class _Bounded:
    """A sum of powers over dimension `dim`, bounded from below by a number that is at most what they add up to in a row
    that sees a key. `nodes` are the sum and what bounds it.

    `least` is what is left where all powers are 0, and `safe` says that they are 0 in a row that sees no key, and that
    this is not.
    """

    dim: int
    nodes: tuple[fx.Node, fx.Node]
    least: float
    safe: bool


def _bounded(total: fx.Node, of: fx.Node, exponent: fx.Node, trace: Trace) -> _Bounded | None:
    """What `total` is if it is a bounded sum of `of`, powers with an `exponent` some of which may be set to 0."""
    found = above_least(total, trace)
    dim = None if found is None else _summed_dim(found[0], of, trace)
    reached = None if dim is None else reaches_one(exponent, dim, trace)
    if found is None or dim is None or reached is None:
        return None
    summed, least = found
    nodes = trace.source(summed), trace.source(total)
    assert nodes[0] is not None
    assert nodes[1] is not None
    return _Bounded(dim, (nodes[0], nodes[1]), least, reached == "or 0" and least > 0)


def _divided_by_bounded(
    node: fx.Node, numerator: fx.Node, source: fx.Node, total: fx.Node, trace: Trace
) -> Weights | None:
    """Weights that are an exponential `source`, perhaps with zeros, divided by its sum, which is bounded from below."""
    zeros = zeroed(source, trace)
    exponent = exponent_of(source if zeros is None else zeros.of)
    found = None if exponent is None else _bounded(total, source, exponent[0], trace)
    if exponent is None or found is None or not _spans(trace[total], trace[numerator], found.dim):
        return None
    weights = Weights(node, exponent[0], found.dim, factor=exponent[1], safe=found.safe)
    if zeros is None:
        return weights
    if zeros.seen is None:
        return None
    seen = replace(zeros.seen, renormed=True, bounded=found.least > 0)
    return replace(weights, seen=seen, within=(zeros.of, source, *found.nodes))


def _divided_by_one(node: fx.Node, numerator: fx.Node, source: fx.Node, total: fx.Node, trace: Trace) -> Weights | None:
    """Weights `source` divided by their sum, or by that bounded from below by at most the 1 that it is."""
    summed, least = above_least(total, trace) or (total, 0.0)
    dim = _summed_dim(summed, source, trace)
    weights = None if dim is None else weights_of(source, trace)
    if weights is None or weights.dim != dim or weights.seen is not None or weights.shares is not None:
        return None
    if not _spans(trace[total], trace[numerator], weights.dim):
        return None
    between = walk(node.all_input_nodes, lambda each: () if each is source else makers(each))
    within = (*weights.within, *between)
    zeros = least > 0  # a row of zeros stays one, where 0 / 0 is NaN
    return replace(weights, node=node, safe=weights.safe and zeros, numbers=weights.numbers and zeros, within=within)


def more_than_one(node: fx.Node, trace: Trace) -> float | None:
    """What weights that add up to 1 are divided by in `node`, if it is their sum and a number more; None otherwise."""
    numerator, total = arguments(node)[:2]
    source = copied(numerator, trace)
    weights = weights_of(source, trace)
    if source is None or weights is None or weights.seen is not None or weights.shares is not None:
        return None
    dim = weights.dim

    def sums(addend: Any) -> bool:
        return _summed_dim(addend, source, trace) == dim and _spans(trace[addend], trace[numerator], dim)

    added = added_to(total, sums, trace) if is_tensor(total) else None
    numbers = [constant_of(number) for number in added[1]] if added is not None else []
    known = [number for number in numbers if number is not None and number > 0]
    return 1 + sum(known) if known and len(known) == len(numbers) else None


def _shared(node: fx.Node, numerator: fx.Node, source: fx.Node, total: fx.Node, trace: Trace) -> Weights | None:
    """Weights that are an exponential `source` divided by its sum plus something else."""

    def sums(addend: Any) -> bool:
        dim = _summed_dim(addend, source, trace)
        return dim is not None and _spans(trace[addend], trace[numerator], dim)

    exponent, added = exponent_of(source), added_to(total, sums, trace)
    if exponent is None or added is None or len(trace[total].dims) != len(trace[numerator].dims):
        return None
    dim = _summed_dim(added[0], source, trace)
    if dim is None or not _spans(trace[total], trace[numerator], dim):
        return None
    shares = shares_of(*exponent, added[1], dim, exponent_of, trace, lost_beside_one(added[0], total))
    if shares is None or (not shares.sinks and not shares.numbers):
        return None
    return Weights(node, shares.scores, dim, factor=exponent[1], safe=shares.safe, shares=shares)


def exponent_of(node: Any) -> tuple[fx.Node, float] | None:
    """The exponent of a power, and the logarithm of its base; None if `node` is no power."""
    if not isinstance(node, fx.Node):
        return None
    match node.target:
        case aten.exp.default:
            return arguments(node)[0], 1.0
        case aten.exp2.default:
            return arguments(node)[0], math.log(2)
        case aten.pow.Scalar if isinstance(base := arguments(node)[0], int | float) and 1 < base < math.inf:
            return arguments(node)[1], math.log(base)
    return None


def divided_by_more(node: Any, trace: Trace) -> fx.Node | None:
    """The divisor of powers of scores, or of weights, if it is a sum or a norm with a number added, or clamped."""
    if not isinstance(node, fx.Node) or node.target is not aten.div.Tensor:
        return None
    source, divisor = copied(arguments(node)[0], trace), arguments(node)[1]
    if source is not None and (found := zeroed(source, trace)) is not None:
        source = found.of
    if source is None or not is_tensor(divisor) or (exponent_of(source) is None and weights_of(source, trace) is None):
        return None
    whole = total = trace.source(divisor)
    while total is not None and total.target in _WITH_A_NUMBER and is_tensor(arguments(total)[0]):
        total = trace.source(arguments(total)[0])
    return whole if total is not None and total is not whole and total.target in _TOTALS else None


_WITH_A_NUMBER = {
    aten.add.Scalar,
    aten.add.Tensor,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.maximum.default,
}
_NORMS = (aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim)
_TOTALS = {aten.sum.dim_IntList, *_NORMS}


def _inverted(node: Any, trace: Trace) -> fx.Node | None:
    """What a tensor is the reciprocal of, perhaps times 1, which is how torch computes `1 / x`."""
    source = copied(node, trace)
    if source is not None and source.target is aten.mul.Tensor and arguments(source)[1] == 1:
        source = copied(arguments(source)[0], trace)
    if source is None or source.target is not aten.reciprocal.default:
        return None
    total = arguments(source)[0]
    return total if isinstance(total, fx.Node) else None


def late(node: fx.Node, trace: Trace) -> tuple[Form, int, Weights] | None:
    """For a division `(e @ v) / e.sum()`: the product's form, which operand of it is `e`, and the weights."""
    product, total = arguments(node)[:2]
    if not is_tensor(product) or not is_tensor(total) or len(trace[product].dims) != len(trace[node].dims):
        return None
    form = replace(trace[product], term=factored(trace[product].term))
    parts = form.term.parts
    if not isinstance(parts, Product) or parts.scale != 1.0:
        return None
    for side, operand in enumerate((parts.left, parts.right)):
        source = operand.read.source
        exponent = exponent_of(source)
        if not isinstance(source, fx.Node) or exponent is None:
            continue
        dim, bounded = _summed_dim(total, source, trace), _bounded(total, source, exponent[0], trace)
        if dim is None and bounded is not None:
            dim = bounded.dim
        if dim is None:
            return None
        whole, divisor = _aligned(form, trace[total])
        assert isinstance(whole.term.parts, Product)
        exponential = (whole.term.parts.left, whole.term.parts.right)[side].read
        rows = tuple(tuple(d.axis for d in digits if d.axis is not None) for digits in exponential.dims)
        if not _runs_over(divisor.term.read, rows, dim) or not exponential.whole:
            return None
        divisor_node = divisor.term.read.source
        assert isinstance(divisor_node, fx.Node)
        weights = Weights(source, exponent[0], dim, divisor_node, exponent[1])
        if bounded is not None:
            weights = replace(weights, safe=bounded.safe, within=bounded.nodes[:1])
        return whole, side, weights
    return None


def _exponential(node: fx.Node, trace: Trace) -> Weights | None:
    """Weights that are the `exp` of their own logarithm."""
    source = copied(arguments(node)[0], trace)
    if source is None:
        return None
    if source.target is aten._log_softmax.default:
        return Weights(node, arguments(source)[0], arguments(source)[1] % len(trace[source].dims))
    if source.target is not aten.sub.Tensor or source.kwargs:
        return None
    scores, total = arguments(source)[:2]
    if not is_tensor(scores) or not is_tensor(total):
        return None
    unfilled = before_finite(total, trace)
    logarithm = unfilled or trace.source(total)
    if logarithm is None or logarithm.target is not aten.logsumexp.default:
        return None
    of, dims = arguments(logarithm)[:2]
    rank = len(trace[scores].dims)
    if len(dims) != 1 or trace[of] != trace[scores]:
        return None
    dim = dims[0] % rank
    spans = _spans(trace[total], trace[scores], dim)
    return Weights(node, scores, dim, safe=unfilled is not None) if spans else None


def _summed_dim(total: fx.Node, of: fx.Node, trace: Trace) -> int | None:
    """The dimension of `of`, of which no element is negative, over which `total` is its sum."""
    source = trace.source(total)
    if source is None or source.target not in (aten.sum.dim_IntList, *_NORMS):
        return None
    rest = arguments(source)[1:]
    if source.target in _NORMS:
        if rest[0] != 1:
            return None
        rest = rest[1:]
    dims: Any = (*rest, None)[0]
    if copied(arguments(source)[0], trace) is not of or not dims or len(dims) != 1:
        return None
    return int(dims[0]) % len(trace[of].dims)


def _aligned(whole: Form, reduced: Form) -> tuple[Form, Form]:
    rank = len(whole.dims)
    labels = list(range(rank))
    (whole, reduced), _ = operations.align([whole, reduced], [labels, labels[rank - len(reduced.dims) :]])
    return whole, reduced


def _spans(reduced: Form, whole: Form, but: int) -> bool:
    """Whether `reduced` broadcasts over `whole` as a reduction of it over dimension `but` does."""
    whole, reduced = _aligned(whole, reduced)
    return _runs_over(reduced.term.read, whole.dims, but)


def _runs_over(read: Read, dims: tuple[Dim, ...], but: int) -> bool:
    """Whether a read of a reduced tensor, which may have kept the dimension, runs over all of `dims` except `but`, each
    of them whole and in order."""
    own = list(read.dims)
    if len(own) == len(dims) and not own[but]:
        del own[but]
    wanted = [axes for i, axes in enumerate(dims) if i != but]
    if read.factors or len(own) != len(wanted):
        return False
    return all(
        tuple(d.axis for d in digits) == axes and all(d.whole for d in digits)
        for digits, axes in zip(own, wanted, strict=True)
    )
