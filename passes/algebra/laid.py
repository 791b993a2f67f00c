"""Slices of flattened axes that cut through one of the axes: `x.flatten(1, 2)[:, :n]`.

Such a range of indices is no product of axes. The flattened tensor therefore becomes a source of its own (`Laid`), in
which one axis takes the place of several.

Pure Python, like `operations`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from .sizes import Size, Unaligned, product
from .substitution import change_read, merge
from .terms import Axis, Digit, Dim, Form, Join, Laid, Product, Read, Sum, Term


def lay(form: Form, dim: int) -> Form:
    """The same tensor, with dimension `dim` as a single axis.

    Raises: Unaligned, if a join divides the dimension.
    """
    parts = form.dims[dim]
    whole = Axis(product(axis.size for axis in parts))
    return Form((*form.dims[:dim], (whole,), *form.dims[dim + 1 :]), _lay_term(form.term, parts, whole))


def taken_apart(read: Read, parts: Dim) -> Read:
    """Undo `lay`: the whole tensor of which `read` takes a part, over the axes `parts` in place of that part's axis.

    Raises: Unaligned, if another dimension is not read in full.
    """
    assert isinstance(read.source, Laid)
    others = [digits[0] if len(digits) == 1 else None for digits in read.dims[1:]]
    names = dict(zip(read.source.parts, parts, strict=True))
    for own, digit in zip(read.source.others, others, strict=True):
        if digit is None or digit.axis is None or not digit.whole:
            raise Unaligned("a part of what is laid one behind the other")
        names[own] = digit.axis
    of = change_read(read.source.of, names)
    return replace(of, then=(*of.then, *read.then))


def _lay_term(term: Term, parts: Dim, whole: Axis) -> Term:
    """Apply `lay` to a term. If it runs over `parts`, how its element is stored is forgotten."""
    if term.axes.isdisjoint(parts) and term.read.axes.isdisjoint(parts):
        return term
    read = _lay_read(term.read, parts, whole)
    match term.parts:
        case Product(left, right, summed, scale):
            left, right = _lay_term(left, parts, whole), _lay_term(right, parts, whole)
            return Term(read, Product(left, right, summed, scale))
        case Sum(terms):
            return Term(read, Sum(tuple(_lay_term(addend, parts, whole) for addend in terms)))
        case Join(axis, segments):
            if axis in parts or any(not set(parts).isdisjoint(segment.axes) for segment in segments):
                raise Unaligned("a slice that cuts through pieces and what they are laid in")
            return Term(read, Join(axis, tuple(replace(s, term=_lay_term(s.term, parts, whole)) for s in segments)))
    return Term(read, term.parts, lost=term.lost)


def _lay_read(read: Read, parts: Dim, whole: Axis) -> Read:
    if (merged := merge(read, parts, whole)).axes.isdisjoint(parts):
        return merged  # adjacent in the source, or not read at all
    digits = [digit.axis for digit in read.digits if digit.axis is not None]
    others = tuple(axis for axis in dict.fromkeys(digits) if axis not in parts)
    own = {axis: bound_axis(place, axis.size) for place, axis in enumerate((*parts, *others))}
    bound = tuple(own.values())
    source = Laid(replace(change_read(read, own), then=()), bound[: len(parts)], bound[len(parts) :])
    return Read(source, tuple((Digit(axis, axis.size),) for axis in (whole, *others)), read.then)


@lru_cache(maxsize=4096)
def bound_axis(place: int, size: Size) -> Axis:
    """The bound axis of a source at `place`. Sources share these axes, so that two sources that are alike compare
    equal."""
    return Axis(size)
