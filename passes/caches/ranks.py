"""Find keys that are gathered from the ranks of a group, so that attention can read them where they are.

    latent[b, r * T / k + j] = latent of rank r [b, j]        shares one behind the other
    latent[b, j * k + r]     = latent of rank r [b, j]        token by token, and likewise page by page

What is gathered is a leaf of the trace with an axis of ranks (`trace/collectives`). Keys are gathered if that axis is
one of theirs, or if they are the first of such keys, cut off within a rank's turn (`algebra/laid`). The rope key may be
gathered with the latent or by itself, but from the same group along the same axis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..algebra.laid import taken_apart
from ..algebra.operations import alike
from ..algebra.sizes import Unaligned, product
from ..algebra.substitution import merge
from ..algebra.terms import Axis, Digit, Dim, Laid, Read
from ..mla.site import Site
from ..nodes.arguments import arguments
from ..trace.collectives import gather_behind
from ..trace.trace import Trace


@dataclass(frozen=True)
class Ranks:
    """A process group: `axis` runs over its `count` ranks."""

    axis: Axis
    count: int
    group: str


@dataclass(frozen=True)
class Share:
    """A site as one rank of a group sees it: its keys are those of that rank alone."""

    site: Site
    ranks: Ranks
    keys: Dim
    """The axes of the keys of all ranks. In this order they count all that is gathered, which may be a few more keys
    than the site has."""


def share_of(site: Site, trace: Trace) -> Share | None:
    """The part that each rank has of a site's keys; None if they are not provably gathered from ranks."""
    opened = _opened([site.latent.read, *(rope.key.read for rope in site.ropes)], site.attention.keys)
    if opened is None:
        return None
    reads, gathered = opened
    found = {_gathered(read, gathered) for read in reads}
    ranks = found.pop()
    if ranks is None or found:
        return None
    keys = tuple(axis for axis in gathered if axis is not ranks.axis)
    own_reads = [trace.at(_of_one_rank(read)).read for read in reads]
    one = Axis(product(axis.size for axis in keys))
    merged = [merge(read, keys, one) for read in own_reads]
    if len(keys) > 1 and all(read.axes.isdisjoint(keys) for read in merged):  # they lie one behind the other
        own_reads, keys = merged, (one,)
    latent, *ropes = map(trace.at, own_reads)
    own = [replace(piece, key=rope) for piece, rope in zip(site.ropes, ropes, strict=True)]
    attention = replace(site.attention, keys=keys)
    return Share(replace(site, attention=attention, latent=latent, ropes=tuple(own)), ranks, gathered)


def _opened(reads: list[Read], keys: Dim) -> tuple[list[Read], Dim] | None:
    """Reads of keys over all that is gathered, and the axes of that, where a site's keys are the first of these; None
    where they are others."""
    laid = [read.source.parts for read in reads if isinstance(read.source, Laid)]
    if not laid:
        return _of_first_rank(reads, keys) or (reads, keys)
    parts = tuple(Axis(axis.size) for axis in laid[0])
    firsts = [read.dims[0] for read in reads]
    if len(laid) != len(reads) or len(keys) != 1 or not all(alike(of, parts) for of in laid):
        return None
    if any(len(digits) != 1 or digits[0] != Digit(keys[0], digits[0].extent) for digits in firsts):
        return None
    try:
        return [taken_apart(read, parts) for read in reads], parts
    except Unaligned:
        return None


def _of_first_rank(reads: list[Read], keys: Dim) -> tuple[list[Read], Dim] | None:
    """The same where each rank has one turn and all keys are in the first rank's; None otherwise."""
    counts = {_pinned(read) for read in reads}
    digits = [digit for read in reads for digit in read.digits if digit.axis in keys]
    count, turns = counts.pop(), {digit.extent for digit in digits}
    if count is None or counts or len(keys) != 1 or len(digits) != len(reads) or len(turns) != 1:
        return None
    if any(digit != Digit(keys[0], digit.extent) for digit in digits):
        return None
    ranks, turn = Axis(count), Axis(turns.pop())

    def whole(digit: Digit) -> Digit:
        return Digit(turn, turn.size) if digit.axis is keys[0] else digit

    opened = []
    for read in reads:
        first, *dims = (tuple(map(whole, dim)) for dim in read.dims)
        opened.append(replace(read, dims=((Digit(ranks, count), *first[1:]), *dims)))
    return opened, (ranks, turn)


def _pinned(read: Read) -> int | None:
    """The number of ranks, if a read takes only the first rank's part of what is gathered; else None."""
    gather = gather_behind(read.source)
    if gather is None or not read.dims[0]:
        return None
    _, count, _ = arguments(gather)
    return count if read.dims[0][0] == Digit(None, count) else None


def _gathered(read: Read, keys: Dim) -> Ranks | None:
    """The ranks from which a read of keys is gathered, if it is."""
    gather = gather_behind(read.source)
    if gather is None or not read.dims[0]:
        return None
    _, count, group = arguments(gather)
    digit = read.dims[0][0]
    if digit.axis is None or digit.axis not in keys or not digit.whole or digit.extent != count:
        return None
    return Ranks(digit.axis, count, group)


def _of_one_rank(read: Read) -> Read:
    """A read of gathered tensors as a read of one rank's tensor."""
    gather = gather_behind(read.source)
    assert gather is not None
    operand, *_ = arguments(gather)
    return replace(read, source=operand, dims=(read.dims[0][1:], *read.dims[1:]))
