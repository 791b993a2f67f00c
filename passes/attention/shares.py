"""What else takes a share of the attention weights, where their sum is written by hand and more is added to it.

e / (1 + e.sum()),  e = exp(s)                                  a key of score 0 without value: "softmax one"
e / (exp(-m) + e.sum()),  e = exp(s - m),  m = s.amax()         the same, after the maximum was subtracted
e / (exp(t - m) + e.sum()),  e = exp(s - m),  m = max(s.amax(), t)      a sink `t`
e / (1e-9 + e.sum()),  e = exp(s - m),  m = s.amax()            nothing: 1e-9 is rounded away beside 1 or more
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from ..nodes.arguments import arguments, aten, factor_of, is_tensor
from ..nodes.constants import constant_of
from ..trace.trace import Trace
from .copies import copied, original_of
from .finite import before_finite
from .shift import is_greatest

_ADDS = {aten.add.Tensor, aten.add.Scalar}
_AT_LEAST = {aten.clamp.default, aten.clamp_min.default}


@dataclass(frozen=True)
class Shares:
    """Scores of keys without values: `sinks`, and `numbers`, the logarithms of the numbers that were added.

    `scores` are those of the keys with values, before the same shift was subtracted from them and from the sinks.
    `safe`: that shift is finite even in a row that sees no key, unless sinks there are -inf.
    """

    scores: fx.Node
    sinks: tuple[fx.Node, ...] = ()
    numbers: tuple[float, ...] = ()
    safe: bool = True


def added_to(total: fx.Node, sum_of: Callable[[Any], bool], trace: Trace) -> tuple[fx.Node, list[Any]] | None:
    """The addend of `total` for which `sum_of` holds, and the other addends; None if `total` has no such addend."""
    source = copied(total, trace)
    if source is None or source.target not in _ADDS or factor_of(source) != 1:
        return None
    a, b = arguments(source)[:2]
    for one, other in ((a, b), (b, a)):
        if not is_tensor(one):
            continue
        if sum_of(one):
            return one, [other]
        if (inner := added_to(one, sum_of, trace)) is not None:
            return inner[0], [*inner[1], other]
    return None


def reaches_one(exponent: fx.Node, dim: int, trace: Trace) -> Literal["or NaN", "or 0"] | None:
    """Whether an exponent is scores minus the maximum of their row: one of its powers is then 1, and their sum at least
    1, unless the row sees no key: then the sum is NaN, or 0 where that maximum was replaced by a number."""
    difference = copied(exponent, trace)
    if difference is None or difference.target is not aten.sub.Tensor or factor_of(difference) != 1:
        return None
    scores, shift = arguments(difference)[:2]
    if not is_tensor(shift) or not is_greatest(shift, scores, dim, trace):
        return None
    return "or NaN" if before_finite(shift, trace) is None else "or 0"


def above_least(total: fx.Node, trace: Trace) -> tuple[fx.Node, float] | None:
    """The tensor that `total` equals wherever that is at least 1, and what `total` is where that is 0; None if there is
    none.

    max(x, 0.5),  x + 1e-9  ->  x
    """
    source = copied(total, trace)
    if source is None or source.target not in (*_AT_LEAST, *_ADDS):
        return None
    of, least, most = (*arguments(source), None, None)[:3]
    clamps = source.target in _AT_LEAST
    if not clamps and not is_tensor(of):
        of, least = least, of
    least, most = (least, most) if clamps else (constant_of(least), None)
    if not is_tensor(of) or not isinstance(least, int | float) or most is not None:
        return None
    if not clamps and (factor_of(source) != 1 or not 0 <= least < lost_beside_one(of, total)):
        return None
    if least > 1 or 0 < least < max(torch.finfo(tensor.meta["val"].dtype).tiny for tensor in (of, total)):
        return None  # the latter would be 0
    return of, least


def lost_beside_one(*tensors: fx.Node) -> float:
    """The number from which on an addition to 1 makes a difference in the dtypes of tensors."""
    return min(torch.finfo(tensor.meta["val"].dtype).eps for tensor in tensors) / 2


def shares_of(
    exponent: fx.Node,
    base: float,
    addends: list[Any],
    dim: int,
    exponent_of: Callable[[Any], Any],
    trace: Trace,
    lost: float = 0.0,
) -> Shares | None:
    """The scores of further keys for which `addends` to a sum of exponentials over dimension `dim` stand; None if that
    is not known of one of them.

    `base` is the logarithm of the exponentials' base. Numbers less than `lost` vanish beside a sum that is 1 or more.
    """
    difference = copied(exponent, trace)
    shift: fx.Node | None = None
    scores = exponent
    if difference is not None and difference.target is aten.sub.Tensor and factor_of(difference) == 1:
        a, b = arguments(difference)[:2]
        if is_tensor(a) and is_tensor(b) and _is_the_same_for_keys(b, exponent, dim, trace):
            scores, shift = a, copied(b, trace)
            if shift is None:
                return None
    sinks: list[fx.Node] = []
    numbers: list[float] = []
    for addend in (part for each in addends for part in _parts(each, trace)):
        found = _logarithm(addend, exponent_of, trace)
        if found is None:
            return None
        power, own_base, number = found
        if shift is None and power is None:
            numbers.append(number)
            continue
        if power is None and math.exp(number) < lost and reaches_one(exponent, dim, trace):
            continue
        if power is None or own_base != base:
            return None
        before = _before(power, shift, trace)
        if before is None or (before and (number != 0 or not _is_the_same_for_keys(before[0], exponent, dim, trace))):
            return None
        if before:
            sinks += before
        else:
            numbers.append(number)
    safe = shift is None or _is_number(shift, scores, sinks, dim, trace)
    if safe is None:
        return None
    return Shares(scores, tuple(sinks), tuple(numbers), safe)


def _parts(addend: Any, trace: Trace) -> list[Any]:
    """The operands of an addition, taken apart likewise; anything else by itself."""
    if is_tensor(addend) and addend.target in _ADDS and factor_of(addend) == 1:
        return [part for operand in arguments(addend)[:2] for part in _parts(operand, trace)]
    return [addend]


def _logarithm(
    addend: Any, exponent_of: Callable[[Any], Any], trace: Trace
) -> tuple[fx.Node | None, float, float] | None:
    """For `number * base**power`: the power, None if there is none, and the logarithms of the base and of the number.

    None if the addend is not of this form.
    """
    known = constant_of(addend)
    if known is not None:
        return (None, 0.0, math.log(known)) if 0 < known < math.inf else None
    original = original_of(addend, trace)
    source = addend if original is None else original.node
    factor = 1.0 if original is None else math.prod(original.factors)
    if not 0 < factor < math.inf or (original is None and trace[addend].term.read.source is not addend):
        return None
    if (found := exponent_of(source)) is not None:
        return found[0], found[1], math.log(factor)
    if source.target is aten.mul.Tensor:
        a, b = arguments(source)[:2]
        for one, other in ((a, b), (b, a)):
            number = constant_of(other)
            inner = _logarithm(one, exponent_of, trace) if number is not None and 0 < number < math.inf else None
            if inner is not None and number is not None:
                return inner[0], inner[1], inner[2] + math.log(number * factor)
    return None


def _before(power: fx.Node, shift: fx.Node | None, trace: Trace) -> tuple[fx.Node, ...] | None:
    """A score before `shift` was subtracted from it, empty if it was 0; None if the shift was not subtracted."""
    if shift is None:
        return (power,)
    node = copied(power, trace)
    if node is None or node.op != "call_function":
        return None
    first, second = (*arguments(node), None, None)[:2]
    if node.target is aten.neg.default and copied(first, trace) is shift:
        return ()
    if node.target in (aten.mul.Tensor, aten.mul.Scalar) and second == -1 and copied(first, trace) is shift:
        return ()
    taken = node.target is aten.sub.Tensor and factor_of(node) == 1 and copied(second, trace) is shift
    return (first,) if taken and is_tensor(first) else None


def _is_number(shift: fx.Node, scores: fx.Node, sinks: list[fx.Node], dim: int, trace: Trace) -> bool | None:
    """Whether the shift of scores is finite where all of them are -inf, or -inf only where sinks are too; None if that
    is not known."""
    if is_greatest(shift, scores, dim, trace):
        return before_finite(shift, trace) is not None
    if shift.target in _AT_LEAST:
        of, least, most = (*arguments(shift), None, None)[:3]
        known = isinstance(least, int | float) and math.isfinite(least) and most is None
        return True if known and is_greatest(of, scores, dim, trace) else None
    if shift.target is aten.maximum.default:
        a, b = arguments(shift)
        for greatest, other in ((a, b), (b, a)):
            sink = copied(other, trace) in [copied(sink, trace) for sink in sinks]
            if sink and is_greatest(greatest, scores, dim, trace):
                return True
    return None


def _is_the_same_for_keys(node: fx.Node, scores: fx.Node, dim: int, trace: Trace) -> bool:
    """Whether a tensor, broadcast to the scores, has one element for all keys."""
    form, rank = trace[node], len(trace[scores].dims)
    place = dim - (rank - len(form.dims))
    return len(form.dims) <= rank and (place < 0 or not form.dims[place])
