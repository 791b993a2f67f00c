"""See whether a site's keys are gathered from the ranks of a group, so that attention can read them where they are.

    latent[b, r * T / k + j] = latent of rank r [b, j]        shares one behind the other
    latent[b, j * k + r]     = latent of rank r [b, j]        token by token, and likewise page by page

What is gathered is a leaf of the trace with an axis of ranks (`trace/collectives`): keys are gathered if that axis is
one of theirs. The rope key may be gathered with the latent or by itself, but from the same group along the same axis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from ..algebra.operations import term_of
from ..algebra.sizes import Unaligned, product
from ..algebra.substitution import merge
from ..algebra.terms import Axis, Dim, Read, Term
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
    """A site as one rank of a group has it: its keys are those of that rank alone."""

    site: Site
    ranks: Ranks


def share_of(site: Site, trace: Trace) -> Share | None:
    """The part that each rank has of a site's keys; None if they are not provably gathered from ranks."""
    reads = [site.latent.read, *(rope.key.read for rope in site.ropes)]
    found = {_gathered(read, site.attention.keys) for read in reads}
    ranks = found.pop()
    if ranks is None or found:
        return None
    keys = tuple(axis for axis in site.attention.keys if axis is not ranks.axis)
    own_reads = [_known(_of_one_rank(read), trace).read for read in reads]
    one = Axis(product(axis.size for axis in keys))
    merged = [merge(read, keys, one) for read in own_reads]
    if len(keys) > 1 and all(read.axes.isdisjoint(keys) for read in merged):  # they lie one behind the other
        own_reads, keys = merged, (one,)
    latent, *ropes = (_known(read, trace) for read in own_reads)
    own = [replace(piece, key=rope) for piece, rope in zip(site.ropes, ropes, strict=True)]
    attention = replace(site.attention, keys=keys)
    return Share(replace(site, attention=attention, latent=latent, ropes=tuple(own)), ranks)


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
    """What a read of gathered tensors says of that of one rank."""
    gather = gather_behind(read.source)
    assert gather is not None
    operand, *_ = arguments(gather)
    return replace(read, source=operand, dims=(read.dims[0][1:], *read.dims[1:]))


def _known(read: Read, trace: Trace) -> Term:
    """A read of a tensor with all that is known of the tensor: what it is made of, and how it is stored."""
    assert isinstance(read.source, fx.Node)
    try:
        return term_of(trace[read.source], read)
    except Unaligned:
        return Term(read)
