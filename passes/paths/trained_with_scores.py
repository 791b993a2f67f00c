"""Trained with scores: attention whose weights something else reads, where gradients are needed.

Before   k = cat(latent @ W_UK, k_rope), v = latent @ W_UV, w = f(q k^T), o = w v;  kept for backward: q, k, v, w
After    the same;  kept for backward: q, latent, k_rope, w

The scores have to exist. Keys and values do not: the backward computes them again, by the code that is there.
"""

from __future__ import annotations

from ..attention.functions import Function
from ..caches.stored import StoredKeys
from ..masks.meaning import Meaning
from ..mla.site import Site
from ..nodes.refusal import Refusal
from .by_heads import ByHeads
from .carriers import Carrier
from .chunked import refuse_apart
from .path import Part
from .trained import Trained


class TrainedWithScores(ByHeads):
    """No code of its own: what makes keys and values is marked to be computed again."""

    name = "trained with scores"
    why = f"{Trained.why}; scores are kept, as something else reads them, or a function of them takes several at once"
    may_be_asked = False

    def takes(self, site: Site, meaning: Meaning) -> bool:
        """Sites whose weights something else reads, or are no function of each score, though it refuses some."""
        opaque = site.attention.opaque
        return opaque is not None and (opaque.reader is not None or not isinstance(opaque.function, Function))

    def refuse(self, site: Site, *, asked: bool) -> None:
        """Refuse code that keeps the latent already."""
        if site.absorbed_by_hand:
            reason = "expected an up-projection to recompute for gradients, found scores that are absorbed by hand"
            raise Refusal(site.node, reason)
        refuse_apart(site)

    def parts(self, site: Site, keys: StoredKeys, mask: Carrier | None, workspace_tokens: int) -> list[Part]:
        """None: the code stays."""
        return []
