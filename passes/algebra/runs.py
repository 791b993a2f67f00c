"""Merge pieces that are consecutive elements of one tensor or product, as a loop over sequences or heads leaves them.

    o[0] = w[0] @ v[0]; o[1] = w[1] @ v[1]; ...      o = w @ v, over the axis that was looped over
    cat(x[:3], x[3:])                                x

What two pieces have in common, such as a shared weight, repeats along the axis.

Pure Python, like `joins`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from .made import joined
from .operations import alike, piece_of, read_of
from .sizes import Size, Unaligned, known_at_most, product, quotient, same, total
from .substitution import change_term
from .terms import Axis, Digit, Dim, Form, Join, Product, Read, Segment, Sum, Term, Undefined, Unread, Zero


def as_one(
    source: Hashable, first: Form, second: Form, dim: int, *, joins: bool = False, loosely: bool = False
) -> Form | None:
    """Two pieces, adjacent along `dim` of the tensor `source`, as one; None if what they are made of is not adjacent.

    Their other dimensions have the same axes. A product of which each piece is only a part is no tensor of the graph:
    it is `Unread`. With `joins`, tensors that are not adjacent are joined if they are factors of products whose other
    factor is the same, or stand beside products in a join: there they may be products too, that are not one or that no
    tensor would hold as one. With `loosely`, all these may be parts of one tensor, be addends too, and repeat along an
    axis along which the other differs.
    """
    for a, own, b, others in _seams(first.dims[dim], second.dims[dim]):
        axis = Axis(total([1 if a is None else a.size, 1 if b is None else b.size]))
        seam = _Seam(a, b, axis, source, joins, loosely, apart=bool(own) and a is b is None)
        term = seam.term(first.term, change_term(second.term, dict(zip(others, own, strict=True))))
        if term is not None:
            return Form((*first.dims[:dim], (axis, *own), *first.dims[dim + 1 :]), term)
    return None


def _seams(first: Dim, second: Dim) -> Iterator[tuple[Axis | None, Dim, Axis | None, Dim]]:
    """How two pieces may meet: for each, the axis that counts across the seam (None for a single index) and its
    faster axes, which are alike in both."""
    for a, own in ((None, first), *((axis, first[1:]) for axis in first[:1])):
        for b, others in ((None, second), *((axis, second[1:]) for axis in second[:1])):
            if alike(own, others):
                yield a, own, b, others


Digits: TypeAlias = tuple[Digit, ...]


@dataclass(frozen=True)
class _Seam:
    """Merges a piece that counts along `first` with one that counts along `second`: as one they count along `axis`."""

    first: Axis | None
    second: Axis | None
    axis: Axis
    source: Hashable
    joins: bool = False
    loosely: bool = False
    apart: bool = False
    """Whether both pieces have axes of their own, and this axis only counts the two: they are not joined then."""

    def term(self, a: Term, b: Term, *, is_factor: bool = False, is_piece: bool = False) -> Term | None:
        """The element of both pieces as one; None if they are not adjacent.

        `is_factor`: they are factors of products whose other factor is the same. `is_piece`: they are pieces of joins
        that have products among their pieces.
        """
        if a == b and self.first not in a.axes:
            return a
        read = self.read(a.read, b.read)
        if read is None and self.joins and (is_factor or (is_piece and a.parts is None and b.parts is None)):
            return self._laid(a, b)
        parts = self._parts(a, b)
        if parts is not None:
            over = Term(a.read, parts).axes
            return Term(read or read_of(Unread(self.source), [(axis,) for axis in over]).read, parts)
        if read is None or any(isinstance(term.parts, Undefined | Zero) for term in (a, b)):
            return None
        return Term(read, joined=self._join(a.joined, b.joined) if a.joined and b.joined else None)

    def _laid(self, a: Term, b: Term) -> Term | None:
        """A read of the two tensors joined; None if they cannot be."""
        if self.apart or any(
            isinstance(t.read.source, Unread) or isinstance(t.parts, Undefined | Zero) for t in (a, b)
        ):
            return None
        beside = a.axes - {self.first}, b.axes - {self.second}
        if not self.loosely and (a.read.source == b.read.source or beside[0] != beside[1]):
            return None
        along = tuple(() if axis is None else (axis,) for axis in (self.first, self.second))
        both = joined(a.read, b.read, (along[0], along[1]), self.axis)
        return None if both is None else Term(both)

    def _held(self, both: Term | None, a: Term, b: Term) -> Term | None:
        """`both`, the element of two pieces as one, read from the two tensors joined if no tensor holds it; that read
        alone, if `both` is not known."""
        if both is not None and not isinstance(both.read.source, Unread):
            return both
        laid = self._laid(a, b)
        return both if laid is None else laid if both is None else replace(both, read=laid.read)

    def read(self, a: Read, b: Read) -> Read | None:
        """The read of both pieces as one; None if they are not adjacent in one source."""
        if a == b and self.first not in a.axes:
            return a
        if a.source != b.source or a.then != b.then or len(a.dims) != len(b.dims):
            return None
        dims = [own if own == more else self._digits(own, more) for own, more in zip(a.dims, b.dims, strict=True)]
        changed = [digits for digits, own in zip(dims, a.dims, strict=True) if digits != own]
        known = tuple(digits for digits in dims if digits is not None)
        return replace(a, dims=known) if len(changed) == 1 and len(known) == len(dims) else None

    def _digits(self, a: Digits, b: Digits) -> Digits | None:
        """The digits of one dimension in which the two pieces differ; None if these are not adjacent."""
        whole = len(b) - 1  # the digits that do not count parts
        if len(b) <= len(a) and a[len(a) - whole :] == b[1:]:
            parts = self._parts_of(a[: len(a) - whole], b[0], product(digit.extent for digit in b[1:]))
            if parts is not None:
                return *parts, *b[1:]
        a, b = self._divided(a), self._divided(b)
        places = [i for i, (own, other) in enumerate(zip(a, b, strict=False)) if own != other]
        if len(places) != 1 or len(a) != len(b):
            return None
        (i,) = places
        digit = self._digit(a[i], b[i])
        return None if digit is None else (*a[:i], digit, *a[i + 1 :])

    def _parts_of(self, a: Digits, part: Digit, each: Size) -> Digits | None:
        """The digits of adjacent parts, all of one size, of a dimension whose extent, or their start, is no multiple of
        that.

        `a` are the digits of the parts so far and `part` is that of the next. One step of these digits spans `each`
        indices of the dimension.
        """
        if part.axis is None or part.axis in (self.first, self.second) or self.second is not None or part.step != 1:
            return None
        size = part.axis.size
        if quotient(part.extent, size) is not None and quotient(part.start, size) is not None:
            return None

        def behind(digit: Digit) -> Size:
            return total([digit.extent, -digit.start, -size]) * each

        count, (slow, *faster) = self.axis.size - 1, a
        if not faster and self.first is None and slow.axis is part.axis and slow.step == 1:
            before, after = total([slow.before, slow.start * each]), total([slow.after, behind(slow)])
        elif len(faster) == 1 and slow.axis is self.first and faster[0] == Digit(part.axis, size):
            before, after = slow.before, slow.after
        else:
            return None
        starts = total([before, count * size * each]), total([part.before, part.start * each])
        rests = total([after, -size * each]), total([part.after, behind(part)])
        if not (same(*starts) and same(*rests)):
            return None
        return Digit(self.axis, self.axis.size, before=before, after=rests[0]), Digit(part.axis, size)

    def _divided(self, digits: Digits) -> Digits:
        """The digits, with each that takes one of several equal parts split: a pinned digit then says which part."""

        def divided(digit: Digit) -> Digits:
            if digit.axis in (None, self.first, self.second) or digit.step != 1 or digit.whole:
                return (digit,)
            assert digit.axis is not None
            start, extent = quotient(digit.start, digit.axis.size), quotient(digit.extent, digit.axis.size)
            if start is None or extent is None or same(extent, 1):
                return (digit,)
            return replace(digit, axis=None, extent=extent, start=start), Digit(digit.axis, digit.axis.size)

        return tuple(d for digit in digits for d in divided(digit))

    def _digit(self, a: Digit, b: Digit) -> Digit | None:
        size: Size = 1 if self.first is None else self.first.size
        if a.axis is not self.first or b.axis is not self.second or a.step != 1:
            return None
        follows = replace(a, axis=b.axis, start=total([a.start, size]))
        return replace(a, axis=self.axis) if _same_digit(follows, b) else None

    def _parts(self, a: Term, b: Term) -> Product | Sum | Join | Zero | None:
        match a.parts, b.parts:
            case Zero(), Zero():
                return Zero()
            case Product(left, right, summed, scale), Product() as other:
                if scale != other.scale or not alike(summed, other.summed):
                    return None
                own = dict(zip(other.summed, summed, strict=True))
                pairs = (left, change_term(other.left, own)), (right, change_term(other.right, own))
                shared = any(one == more and self.first not in one.axes for one, more in pairs)
                sides = [self.term(*pair, is_factor=shared) for pair in pairs]
                return Product(sides[0], sides[1], summed, scale) if sides[0] and sides[1] else None
            case Sum(terms), Sum(others) if len(terms) == len(others):
                both = [self.term(*pair, is_piece=self.loosely) for pair in zip(terms, others, strict=True)]
                known = tuple(term for term in both if term is not None)
                return Sum(known) if len(known) == len(terms) else None
            case Join() as join, Join() as other:
                return self._join(join, other)
        return None

    def _join(self, a: Join, b: Join) -> Join | None:
        pairs = _cut_alike(a.segments, b.segments)
        if pairs is None or not same(a.axis.size, b.axis.size):
            return None
        beside_products = any(_has_product(segment.term) for segment in a.segments)
        pieces = []
        for segment, more in pairs:
            other = change_term(more.term, dict(zip(more.axes, segment.axes, strict=True)))
            term = self.term(segment.term, other, is_piece=beside_products)
            if beside_products and self.joins:
                term = self._held(term, segment.term, other)
            if term is None:
                return None
            pieces.append(replace(segment, term=term))
        if beside_products and not any(_has_product(piece.term) for piece in pieces):
            return None  # apart, the pieces say what they are products of
        return Join(a.axis, tuple(pieces))


def _cut_alike(first: Sequence[Segment], second: Sequence[Segment]) -> list[tuple[Segment, Segment]] | None:
    """The segments of two joins in pairs, plain tensors cut where the other join has a seam: a rope that was joined of
    halves stands beside one that was not. None if more than plain tensors would have to be cut."""
    pairs = list[tuple[Segment, Segment]]()
    left, right = [*first], [*second]
    while left and right:
        a, b = left.pop(0), right.pop(0)
        if not alike(a.axes, b.axes):
            if (parts := _cut(a, b)) is not None:
                a, *left[:0] = parts
            elif (parts := _cut(b, a)) is not None:
                b, *right[:0] = parts
            else:
                return None
        pairs.append((a, b))
    return None if left or right else pairs


def _cut(segment: Segment, other: Segment) -> list[Segment] | None:
    """A plain tensor as a segment with the axes of `other`, and one of what is left of it, if anything is; None if it
    is no plain tensor over one axis, may be smaller than `other`, or does not divide like it."""
    if segment.term.parts is not None or len(segment.axes) != 1 or not known_at_most(other.size, segment.size):
        return None
    (axis,), rest = segment.axes, total([segment.size, -1 * other.size])
    cuts: list[tuple[Size, Dim]] = [(0, other.axes)]
    if not same(rest, 0):
        cuts.append((other.size, () if same(rest, 1) else (Axis(rest),)))
    try:
        return [Segment(axes, piece_of(segment.term, axis, start, axes)) for start, axes in cuts]
    except Unaligned:
        return None


def _has_product(term: Term) -> bool:
    terms = term.parts.terms if isinstance(term.parts, Sum) else (term,)
    return any(isinstance(addend.parts, Product) for addend in terms)


def _same_digit(a: Digit, b: Digit) -> bool:
    sizes = zip((a.extent, a.start, a.before, a.after), (b.extent, b.start, b.before, b.after), strict=True)
    return a.axis is b.axis and a.step == b.step and all(same(x, y) for x, y in sizes)
