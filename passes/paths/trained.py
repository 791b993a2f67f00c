"""Trained: chunked, where gradients are needed.

Before   k = cat(latent @ W_UK, k_rope), v = latent @ W_UV, o = softmax(q k^T) v; kept for backward: q, k, v, o
After    o = expanded_attention(q, latent, k_rope, W_UK, W_UV); kept for backward: q, latent, k_rope, o
"""

from __future__ import annotations

from ..caches.stored import StoredKeys
from ..masks.meaning import Meaning
from ..mla.site import Site
from ..nodes.refusal import Refusal
from .carriers import MaskAndOffset
from .chunked import Chunked


class Trained(Chunked):
    """The only path that has a backward, which up-projects keys and values again."""

    name = "trained"
    why = "keys and values are up-projected again for gradients"
    carriers = (MaskAndOffset,)
    may_branch = False
    may_be_asked = False

    @property
    def word(self) -> str:
        """It is chunked attention."""
        return Chunked.name

    def takes(self, site: Site, meaning: Meaning) -> bool:
        """Sites whose scores are a sum, though it refuses some of them."""
        return site.attention.opaque is None

    def refuse(self, site: Site, *, asked: bool) -> None:
        """Refuse as chunked does, and what has no up-projections."""
        refuse_absorbed(site)
        super().refuse(site, asked=asked)

    def can_read(self, keys: StoredKeys, site: Site, meaning: Meaning) -> bool:
        """Keys that are one tensor."""
        return not keys.in_pages and keys.coded is None

    def prefers_lengths(self, device: str) -> bool:
        """Never: all keys that there are have gradients."""
        return False


def refuse_absorbed(site: Site) -> None:
    """Refuse what has no up-projections: it keeps the latent alone already."""
    if site.w_uk is None or site.w_uv is None:
        reason = "expected up-projections to do again for gradients, found attention that is absorbed by hand"
        raise Refusal(site.node, reason)
