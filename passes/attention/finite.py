"""A tensor, the maximum or the logarithm of a row of scores, with another number wherever it is -inf.

where(isfinite(m), m, 0),  m.masked_fill(m == -inf, 0),  m[isinf(m)] = 0,  nan_to_num(m, neginf=0)      ->  m

Subtracted from scores it leaves rows that see no key at -inf, so that their exponentials are 0 rather than NaN. What
the code puts in the place of NaN or inf does not matter: a row that has either has no weights that are numbers.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from ..nodes.arguments import NEGATIONS, arguments, aten
from ..nodes.constants import constant_of
from ..trace.trace import Trace
from .copies import copied


def before_finite(node: Any, trace: Trace) -> fx.Node | None:
    """What a tensor equals wherever that is not -inf; None if it is no such copy with a number in the place of -inf."""
    source = copied(node, trace)
    if source is None or source.op != "call_function":
        return None
    first, *rest = (*arguments(source), None, None, None)[:4]
    match source.target:
        case aten.nan_to_num.default:
            number = rest[2]
            return copied(first, trace) if number is None or number > -math.inf else None
        case aten.masked_fill.Scalar | aten.masked_fill.Tensor:
            whole, mask, number, replaces = first, rest[0], rest[1], True
        case aten.index_put.default if len(rest[0]) == 1 and not rest[2]:
            whole, mask, number, replaces = first, rest[0][0], rest[1], True
        case aten.where.self if constant_of(rest[0]) is None:
            mask, whole, number, replaces = first, rest[0], rest[1], False
        case aten.where.self:
            mask, whole, number, replaces = first, rest[1], rest[0], True
        case _:
            return None
    of, fill = copied(whole, trace), constant_of(number)
    if of is None or fill is None or not fill > -math.inf:
        return None
    return of if _asks(mask, of, trace, infinite=replaces) else None


def _asks(mask: Any, of: fx.Node, trace: Trace, *, infinite: bool) -> bool:
    """Whether a mask is True wherever `of` is -inf and False wherever it is finite; or, if not `infinite`, the
    opposite."""
    source = copied(mask, trace)
    if source is None or source.op != "call_function":
        return False
    a, b = (*arguments(source), None)[:2]
    if source.target in NEGATIONS:
        return _asks(a, of, trace, infinite=not infinite)
    if source.target is aten.mul.Tensor and not infinite:  # isfinite(x) is (x == x) * (abs(x) != inf)
        pairs = (a, b), (b, a)
        return any(_asks(one, of, trace, infinite=False) and _equals_itself(other, of, trace) for one, other in pairs)
    if infinite and source.target in (aten.isinf.default, aten.isneginf.default):
        return copied(a, trace) is of
    least = source.target is (aten.eq.Scalar if infinite else aten.ne.Scalar)
    if least and b == math.inf and (size := copied(a, trace)) is not None and size.target is aten.abs.default:
        return copied(arguments(size)[0], trace) is of
    above = not infinite and source.target is aten.gt.Scalar
    return (least or above) and b == -math.inf and copied(a, trace) is of


def _equals_itself(mask: Any, of: fx.Node, trace: Trace) -> bool:
    """Whether a mask is True where `of` is a number: each of those equals itself, and NaN does not."""
    source = copied(mask, trace)
    return (
        source is not None
        and source.target is aten.eq.Tensor
        and all(copied(operand, trace) is of for operand in arguments(source)[:2])
    )
