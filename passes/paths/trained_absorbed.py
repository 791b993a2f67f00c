"""Trained absorbed: attention absorbed by hand where gradients are needed.

Before   o = softmax(q latent^T + q_rope k_rope^T) latent;  kept for backward: q, latent, k_rope, all scores
After    o = latent_attention(q, q_rope, latent, k_rope);   kept for backward: q, latent, k_rope, o
"""

from __future__ import annotations

from ..caches.stored import StoredKeys
from ..masks.meaning import Meaning
from ..mla.site import Site
from .absorbed import Absorbed
from .carriers import MaskAndOffset
from .trained import Trained


class TrainedAbsorbed(Absorbed):
    """Scores are computed again in the backward; keys and values are the latent, or one of them is."""

    name = "trained absorbed"
    why = "scores are computed again for gradients"
    carriers = (MaskAndOffset,)
    may_branch = False
    may_be_asked = False

    @property
    def word(self) -> str:
        """It is absorbed attention."""
        return Absorbed.name

    def takes(self, site: Site, meaning: Meaning) -> bool:
        """Sites whose scores are a sum, and whose keys or values are the latent."""
        return super().takes(site, meaning) and (site.w_uk is None or site.w_uv is None)

    def as_written(self, site: Site) -> str:
        """Not what it keeps for the backward."""
        words = super().as_written(site)
        return f"{words}; {self.why}"

    def can_read(self, keys: StoredKeys, site: Site, meaning: Meaning) -> bool:
        """As `Trained`."""
        return Trained().can_read(keys, site, meaning)

    def prefers_lengths(self, device: str) -> bool:
        """As `Trained`."""
        return Trained().prefers_lengths(device)
