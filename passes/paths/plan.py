"""What one site becomes: a path, the keys as it reads them, and the masks as it takes them."""

from __future__ import annotations

from dataclasses import dataclass

from ..caches.stored import StoredKeys
from ..mla.site import Site
from .carriers import Carrier
from .path import Part, Path


@dataclass(frozen=True)
class Plan:
    """A path for one site."""

    path: Path
    keys: StoredKeys
    mask: Carrier | None
    """None where masks stay as they are in the graph."""
    words: str
    """How it reads the keys; empty where there is nothing to say."""

    @property
    def word(self) -> str:
        """What reports call its path."""
        return self.path.word

    def as_taken(self, site: Site) -> Site:
        """See `Path.as_taken`."""
        return self.path.as_taken(site)

    def parts(self, site: Site, workspace_tokens: int) -> list[Part]:
        """Its code: see `Path.parts`."""
        return self.path.parts(site, self.keys, self.mask, workspace_tokens)
