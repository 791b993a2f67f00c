"""Every implementation of an op that is not ours."""

from __future__ import annotations

from .flash_mla import FLASH_MLA
from .implementation import Implementation

TABLE: dict[str, tuple[Implementation, ...]] = {"paged_latent_attention": (FLASH_MLA,)}
