"""Trained: chunked, where gradients are needed.

Before   k = cat(latent @ W_UK, k_rope), v = latent @ W_UV, o = softmax(q k^T) v; kept for backward: q, k, v, o
After    o = expanded_attention(q, latent, k_rope, W_UK, W_UV); kept for backward: q, latent, k_rope, o
"""

from __future__ import annotations

from ..caches.stored import StoredKeys
from ..masks.meaning import Meaning
from ..mla.site import Site
from .carriers import MaskAndOffset
from .chunked import Chunked


class Trained(Chunked):
    """Its backward up-projects keys and values again."""

    name = "trained"
    why = "keys and values are up-projected again for gradients"
    carriers = (MaskAndOffset,)
    may_branch = False
    may_be_asked = False

    @property
    def word(self) -> str:
        """It is chunked attention."""
        return Chunked.name

    def can_read(self, keys: StoredKeys, site: Site, meaning: Meaning) -> bool:
        """Keys that are one tensor."""
        return not keys.in_pages and keys.coded is None

    def prefers_lengths(self, device: str) -> bool:
        """Never: all keys that there are have gradients."""
        return False
