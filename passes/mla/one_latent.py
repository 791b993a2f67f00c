"""Make one latent of several whose up-projections are added up.

    value[b, n, t, v] = sum_l latent[b, t, l] A[n, v, l] + sum_m other[b, t, m] B[n, v, m]
                      = sum_k [latent, other][b, t, k] [A, B][n, v, k]

Values that are added to those of an earlier layer, whose latent they then also come from, are such a sum. Keys that are
an up-projection of only some of the latents have zeros in their weight for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..algebra.made import constant, joined
from ..algebra.operations import alike
from ..algebra.sizes import product, total
from ..algebra.substitution import change_read
from ..algebra.terms import Axis, Dim, Join, Product, Read, Sum, Term, Unread
from ..attention.attention import Attention
from .products import UpProjection, gathered, same_tensor, summands, times, up_projection


def in_one_latent(attention: Attention, *, of_keys: bool = False) -> Attention | None:
    """An attention whose values are an up-projection of one latent, which is several side by side, and whose keys are
    too where they come from no other latents. None if its values do not come from several latents, or, where latents
    `of_keys` count as well, neither do they together with the keys of each head."""
    keys, rows = {*attention.keys}, {*attention.rows}
    if isinstance(attention.value.parts, Join):  # of groups of heads, perhaps, with a latent each
        return None
    found = [up_projection(addend, keys) for addend in summands(attention.value, keys) if addend.axes & keys]
    ups = [up for up in found if up is not None]
    if len(ups) < len(found):
        return None
    if of_keys:
        addends = [addend for score in attention.scores for addend in summands(score.key, keys)]
        found = [up_projection(addend, keys) for addend in addends]
        ups += [up for up in found if up is not None and up.weight.axes & rows - up.latent.axes]
    each = list[tuple[Read, Dim]]()
    for up in ups:
        if _place(up, each) is None:
            each.append((up.latent.read, up.rank))
    whole = _side_by_side(each) if len(each) > 1 else None
    if whole is None:
        return None
    one = _OneLatent(each, Term(whole[0]), whole[1], keys)
    if (value := one.of(attention.value)) is attention.value:
        return None
    return replace(attention, value=value, scores=tuple(replace(s, key=one.of(s.key)) for s in attention.scores))


@dataclass(frozen=True)
class _OneLatent:
    """Several latents with their ranks, and all of them side by side in `whole`, over `rank`."""

    each: Sequence[tuple[Read, Dim]]
    whole: Term
    rank: Axis
    keys: set[Axis]

    def of(self, term: Term) -> Term:
        """A term with its up-projections of some of these latents as one of all of them; itself if it has none."""
        match term.parts:
            case Join(_, segments):
                pieces = [self.of(segment.term) for segment in segments]
                if all(piece is segment.term for piece, segment in zip(pieces, segments, strict=True)):
                    return term
                own = tuple(replace(s, term=piece) for s, piece in zip(segments, pieces, strict=True))
                return replace(term, parts=replace(term.parts, segments=own))
            case Sum(terms):
                return self._in_one(term, gathered(terms, self.keys))
            case Product():
                return self._in_one(term, [term])
        return term

    def _in_one(self, whole: Term, addends: Sequence[Term]) -> Term:
        """`whole`, the sum of `addends`, with those that come from these latents made one."""
        weights: dict[int, Read] = {}
        others = list[Term]()
        for addend in addends:
            up = up_projection(addend, self.keys)
            place = None if up is None else _place(up, self.each)
            if up is None or place is None or place in weights:
                others.append(addend)
                continue
            own = dict(zip(up.rank, self.each[place][1], strict=True))
            weights[place] = times(change_read(up.weight, own), up.scale)
        weight = self._weight(weights) if weights else None
        if weight is None:
            return whole
        parts = Product(self.whole, Term(weight), (self.rank,))
        unread = replace(whole.read, source=Unread(whole.read.source))
        one = Term(unread, parts)
        return Term(unread, Sum((one, *others))) if others else one

    def _weight(self, weights: dict[int, Read]) -> Read | None:
        """The weights of the latents side by side, zeros for those that have none; None if they have unlike axes."""
        place, first = next(iter(weights.items()))
        others = tuple(axis for axis in _axes(first) if axis not in self.each[place][1])
        reads = [
            (weights[i] if i in weights else constant(first, 0.0, (*others, *rank)), rank)
            for i, (_, rank) in enumerate(self.each)
        ]
        read = _side_by_side(reads, self.rank)
        return None if read is None else read[0]


def _place(up: UpProjection, latents: Sequence[tuple[Read, Dim]]) -> int | None:
    """Which of the latents is up-projected; None if it is another."""
    for i, (latent, rank) in enumerate(latents):
        if alike(up.rank, rank):
            own = change_read(up.latent.read, dict(zip(up.rank, rank, strict=True)))
            if same_tensor(own, latent):
                return i
    return None


def _axes(read: Read) -> list[Axis]:
    return list(dict.fromkeys(digit.axis for digit in read.digits if digit.axis is not None))


def _side_by_side(reads: Sequence[tuple[Read, Dim]], rank: Axis | None = None) -> tuple[Read, Axis] | None:
    """Reads, each with its own axes of a join, joined along `rank`; None if they have unlike axes otherwise."""
    (read, dim), *others = reads
    for i, (other, own) in enumerate(others):
        size = total(product(axis.size for axis in axes) for axes in (dim, own))
        axis = rank if rank is not None and i == len(others) - 1 else Axis(size)
        both = joined(read, other, (dim, own), axis)
        if both is None:
            return None
        read, dim = both, (axis,)
    return read, dim[0]
