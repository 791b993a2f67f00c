"""Trained absorbed: attention absorbed by hand where gradients are needed.

Before   o = softmax(q latent^T + q_rope k_rope^T) latent;  kept for backward: q, latent, k_rope, all scores
After    o = latent_attention(q, q_rope, latent, k_rope);   kept for backward: q, latent, k_rope, o
"""

from __future__ import annotations

from ..masks.meaning import Meaning
from ..mla.site import Site
from .absorbed import Absorbed
from .in_training import InTraining


class TrainedAbsorbed(InTraining, Absorbed):
    """Scores are computed again in the backward; the keys, the values, or both are the latent."""

    name = "trained absorbed"
    why = "scores are computed again for gradients"

    @property
    def word(self) -> str:
        """It is absorbed attention."""
        return Absorbed.name

    def takes(self, site: Site, meaning: Meaning) -> bool:
        """Sites whose scores are a sum, and whose keys or values are the latent."""
        return super().takes(site, meaning) and (site.w_uk is None or site.w_uv is None) and not site.apart

    def as_written(self, site: Site) -> str:
        """The sentence without gradients, and what is computed again for them."""
        words = super().as_written(site)
        return f"{words}; {self.why}"
