"""Whether heads that are computed one by one are one site, or each is an attention by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ..algebra.sizes import Unaligned
from ..attention.attention import Attention
from ..nodes.guards import GuardNeeded
from ..nodes.refusal import Refusal
from ..trace.trace import Trace
from .prove import prove


def together_or_apart(found: Iterable[Attention | Refusal], trace: Trace) -> Iterator[Attention | Refusal]:
    """What was found, with the heads of an attention in its place where they do not share latents and rope keys: they
    gain nothing together, as keys would be copied to lie side by side."""
    for each in found:
        if isinstance(each, Refusal) or not each.heads_apart or _share(each, trace):
            yield each
        else:
            yield from each.heads_apart


def _share(attention: Attention, trace: Trace) -> bool:
    """Whether all heads of an attention have one latent and the same rope keys."""
    try:
        site = prove(attention, trace)
    except (Refusal, Unaligned, GuardNeeded, GuardOnDataDependentSymNode):
        return False
    return attention.rows[0] in site.heads and not site.own_ropes and site.groups is None
