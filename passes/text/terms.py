"""Reads, terms and forms as text.

kv_b[n * 256 + p, l]                               a read: each dimension as it is counted
sum_l latent[b, t, l] kv_b[n * 256 + p, l]         a product
[nope[b, t, n, p] | rope[b, t, r]]                 a join
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..algebra.sizes import same
from ..algebra.terms import (
    Added,
    Bits,
    Constant,
    Contracted,
    Digit,
    Dim,
    Form,
    Join,
    Joined,
    Laid,
    Named,
    Product,
    Read,
    Scaled,
    Stacked,
    Sum,
    Term,
    Undefined,
    Unread,
    Zero,
)
from .names import Names, factor, short


def read_text(read: Read, names: Names) -> str:
    """What a read names: its tensor, the index in each dimension, and what was done to it after."""
    source: Any = read.source
    match source:
        case Scaled(of, by, axes, how):
            inner = _own(axes)
            name = f"({read_text(of, inner)} {how.value} {read_text(by, inner)})"
        case Added(pieces, axes):
            inner = _own(axes)
            name = f"({' + '.join(read_text(piece, inner) for piece in pieces)})"
        case Contracted(left, right, summed, axes):
            inner = _own((*axes, *summed))
            over = ",".join(map(inner, summed))
            name = f"(sum_{over} {' '.join(_matrix(read, inner) for read in (left, right))})"
        case Laid(of, parts, others):
            inner = _own((*parts, *others))
            name = f"({read_text(of, inner)}).flat({', '.join(map(inner, parts))})"
        case Joined(pieces, along, axes):
            name = f"[{' | '.join(_joined(*piece, axes) for piece in zip(pieces, along, strict=True))}]"
        case Stacked(pieces, axes):
            inner = _own(axes)
            name = f"[{', '.join(read_text(piece, inner) for piece in pieces)}]"
        case Named(_, table, axes):
            inner = _own(axes)
            name = f"({read_text(table, inner)} == {inner(axes[0])})"
        case Constant(_, number):
            name = f"{number:g}"
        case Unread(node):
            name = f"part of {_name(node)}"
        case _:
            name = _name(source)
    text = f"{name}[{', '.join(_index(digits, names) for digits in read.dims)}]"
    for step in read.then:
        text = f"{text} * {step:g}" if isinstance(step, float) else f"{factor(text)}.{_cast(step)}"
    return text


def term_text(term: Term, names: Names) -> str:
    """An element: what it is made of as far as that is known, else how it is read."""
    match term.parts:
        case Product(left, right, summed, scale):
            times = "" if scale == 1 else f"{scale:g} * "
            over = f"sum_{','.join(map(names, summed))} " if summed else ""
            return f"{times}{over}{_operand(left, names)} {_operand(right, names)}"
        case Sum(terms):
            return " + ".join(_operand(addend, names) for addend in terms)
        case Join(_, segments):
            return f"[{' | '.join(term_text(segment.term, names) for segment in segments)}]"
        case Undefined():
            return "unwritten"
        case Zero():
            return "0"
    return read_text(term.read, names)


def form_text(name: str, form: Form, names: Names) -> str:
    """A tensor, one line: `name[b, t, l] = what its element at these axes is`."""
    return f"{name}{names.shape(form.dims)} = {term_text(form.term, names)}"


def _operand(term: Term, names: Names) -> str:
    text = term_text(term, names)
    return f"({text})" if isinstance(term.parts, Product | Sum) else text


def _matrix(read: Read, names: Names) -> str:
    text = read_text(read, names)
    return f"({text})" if read.then else text


def _joined(piece: Read, along: Dim, axes: Dim) -> str:
    """A piece of what is joined, whose own axes along the join are flattened."""
    inner = _own((*along, *axes))
    text = read_text(piece, inner)
    return text if len(along) == 1 else f"({text}).flat({', '.join(map(inner, along))})"


def _own(axes: Dim) -> Names:
    """Names of the axes that belong to a source alone."""
    return Names({f"w{number}": (axis,) for number, axis in enumerate(axes)})


def _index(digits: tuple[Digit, ...], names: Names) -> str:
    """The index in one dimension, slowest digit first."""
    words = _digit(digits[0], names) if digits else "0"
    for digit in digits[1:]:
        words = _plus(f"{factor(words)} * {digit.extent}" if words != "0" else "0", _digit(digit, names))
    return words if not digits or same(digits[0].before, 0) else _plus(str(digits[0].before), words)


def _digit(digit: Digit, names: Names) -> str:
    if digit.axis is None:
        return str(digit.start)
    place = names(digit.axis) if digit.step == 1 else f"{digit.step} * {names(digit.axis)}"
    return place if same(digit.start, 0) else f"{digit.start} + {place}"


def _plus(a: str, b: str) -> str:
    return a if b == "0" else b if a == "0" else f"{a} + {b}"


def _name(source: Any) -> str:
    return source.name if isinstance(source, fx.Node) else str(source)


def _cast(step: Any) -> str:
    if isinstance(step, Bits):
        return f"view({short(step.dtype)})"
    return f"to({short(step)})"
