"""Trained: chunked, where gradients are needed.

Before   k = cat(latent @ W_UK, k_rope), v = latent @ W_UV, o = softmax(q k^T) v; kept for backward: q, k, v, o
After    o = expanded_attention(q, latent, k_rope, W_UK, W_UV); kept for backward: q, latent, k_rope, o
"""

from __future__ import annotations

from .chunked import Chunked
from .in_training import InTraining


class Trained(InTraining, Chunked):
    """Its backward up-projects keys and values again."""

    name = "trained"
    why = "keys and values are up-projected again for gradients"

    @property
    def word(self) -> str:
        """It is chunked attention."""
        return Chunked.name
