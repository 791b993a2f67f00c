"""What paths share that are an op of their own without gradients too."""

from __future__ import annotations

from typing import ClassVar

from ..caches.stored import StoredKeys
from ..masks.meaning import Meaning
from ..mla.site import Site
from .carriers import Carrier, MaskAndOffset
from .path import Path


class InTraining(Path):
    """What the backward of an op leaves of a path: keys of one tensor, under a mask and an offset.

    The first base of a path, before the one that it trains.
    """

    carriers: ClassVar[tuple[type[Carrier], ...]] = (MaskAndOffset,)
    may_branch = False
    may_be_asked = False

    def can_read(self, keys: StoredKeys, site: Site, meaning: Meaning) -> bool:
        """Keys that are one tensor."""
        return Path.can_read(self, keys, site, meaning)

    def prefers_lengths(self, device: str) -> bool:
        """Never: all keys that there are have gradients."""
        return False
