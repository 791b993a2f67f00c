"""Every layout of keys besides dense ones that the passes know: a new one is its own file and a line here."""

from __future__ import annotations

from collections.abc import Callable

from ..mla.site import Site
from .coded import find_coded_keys
from .pages import find_pages
from .stored import StoredKeys

LAYOUTS: tuple[Callable[[Site], StoredKeys | None], ...] = (find_pages, find_coded_keys)
"""One function for each, which returns None where a site's keys are not provably stored so; the first find counts."""


def find_stored_keys(site: Site) -> StoredKeys | None:
    """A site's keys as they are stored; None if they are dense."""
    return next((keys for find in LAYOUTS if (keys := find(site)) is not None), None)
