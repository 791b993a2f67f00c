"""Products of a tensor that runs over the keys with a weight, and sums of such products of one latent.

latent W + s (latent A) B  =  latent (W + s A B)          an adapter beside a projection: one weight
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..algebra.made import added, contracted
from ..algebra.operations import alike
from ..algebra.sizes import total
from ..algebra.substitution import change_read
from ..algebra.terms import Axis, Digit, Dim, Join, Product, Read, Scaled, Sum, Term, Unread
from ..trace.coded import without_widening


@dataclass(frozen=True)
class UpProjection:
    """`scale * sum over rank of latent * weight`, where only the latent runs over the keys."""

    latent: Term
    weight: Read
    rank: Dim
    scale: float


def up_projection(term: Term, keys: set[Axis]) -> UpProjection | None:
    """A term as a product of which exactly one factor runs over the keys; None if it is no such product."""
    if not isinstance(term.parts, Product):
        return None
    left, right = term.parts.left, term.parts.right
    if bool(left.axes & keys) == bool(right.axes & keys):
        return None
    latent, weight = (left, right) if left.axes & keys else (right, left)
    return UpProjection(latent, weight.read, term.parts.summed, term.parts.scale)


def gathered(terms: Sequence[Term], keys: set[Axis]) -> list[Term]:
    """The terms of a sum, those that are up-projections of one latent merged into one, by the sum of their weights; and
    so are multiples of one tensor."""
    found: list[Term] = []
    for term in terms:
        for i, earlier in enumerate(found):
            together = _together(earlier, term, keys) or _multiples(earlier, term)
            if together is not None:
                found[i] = together
                break
        else:
            found.append(term)
    return found


def summands(term: Term, keys: set[Axis]) -> Sequence[Term]:
    """What a term, or a piece of what it is joined from, is a sum of."""
    match term.parts:
        case Join(_, segments):
            return [summand for segment in segments for summand in summands(segment.term, keys)]
        case Sum(terms):
            return gathered(terms, keys)
    return [term]


def _together(a: Term, b: Term, keys: set[Axis]) -> Term | None:
    """`a + b` as one up-projection, of the common latent that is nearest to `a`; None if they have none in common.

    Scales go into the weights, as an adapter has its own.
    """
    for first in _up_projections(a, keys):
        for second in _up_projections(b, keys):
            if not alike(first.rank, second.rank):
                continue
            own = dict(zip(second.rank, first.rank, strict=True))
            if not same_tensor(change_read(second.latent.read, own), first.latent.read):
                continue
            other = change_read(second.weight, own)
            weight = added([times(first.weight, first.scale), times(other, second.scale)])
            whole = a.read.source if isinstance(a.read.source, Unread) else Unread(a.read.source)
            return Term(replace(a.read, source=whole), Product(first.latent, Term(weight), first.rank))
    return None


def _multiples(a: Term, b: Term) -> Term | None:
    """`a + b` as a multiple of the tensor that both read; None if they read others, or more is known of these."""
    (one, first), (other, second) = _without_factor(a.read), _without_factor(b.read)
    return replace(a, read=times(one, first + second)) if a.parts is b.parts is None and one == other else None


def _without_factor(read: Read) -> tuple[Read, float]:
    """A read without the numbers that it is multiplied by at the end, and their product."""
    then, factor = list(read.then), 1.0
    while then and isinstance(last := then[-1], float):
        factor *= last
        then.pop()
    return replace(read, then=tuple(then)), factor


def _up_projections(term: Term, keys: set[Axis]) -> Iterator[UpProjection]:
    """A term as the up-projection that it is and, where its latent is one too, as one of that latent's latent."""
    outer = up_projection(term, keys)
    if outer is None:
        return
    yield outer
    for inner in _up_projections(outer.latent, keys):
        if inner.latent.axes.isdisjoint(outer.rank):
            weight = contracted(inner.weight, outer.weight, outer.rank)
            yield UpProjection(inner.latent, weight, inner.rank, inner.scale * outer.scale)


def times(read: Read, factor: float) -> Read:
    """`factor * read`."""
    return read if factor == 1.0 else replace(read, then=(*read.then, factor))


def same_tensor(a: Read, b: Read) -> bool:
    """Whether two reads name the same numbers, perhaps in other dtypes: whatever rounds one must round the other."""
    a, b = _plainly(without_widening(a)), _plainly(without_widening(b))
    if not isinstance(a.source, Scaled) or not isinstance(b.source, Scaled) or a == b:
        return a == b
    if replace(a, source=None) != replace(b, source=None) or a.source.how != b.source.how:
        return False
    own = dict(zip(b.source.axes, a.source.axes, strict=True))  # their dimensions match, as they are read alike
    pairs = (a.source.of, b.source.of), (a.source.by, b.source.by)
    return all(same_tensor(one, change_read(other, own)) for one, other in pairs)


def _plainly(read: Read) -> Read:
    """A read with an index of one part of a dimension, `x.view(2, 3)[1]`, as a slice of the dimension, `x[3:6]`."""

    def sliced(digits: tuple[Digit, ...]) -> tuple[Digit, ...]:
        if len(digits) < 2 or digits[0].axis is not None:
            return digits
        part, digit, *faster = digits
        extent, start = part.extent * digit.extent, part.start * digit.extent + digit.start
        before, after = part.before, part.after
        if not faster:
            extent, start, before, after = total([before, extent, after]), total([before, start]), 0, 0
        return sliced((replace(digit, extent=extent, start=start, before=before, after=after), *faster))

    return replace(read, dims=tuple(map(sliced, read.dims)))
