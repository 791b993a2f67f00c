"""Every implementation of an op that is not ours, in the order in which they are tried."""

from __future__ import annotations

from .flash_attention_3 import FLASH_ATTENTION_3
from .flash_mla import FLASH_MLA
from .flashinfer import TRTLLM_GEN
from .implementation import Implementation

TABLE: dict[str, tuple[Implementation, ...]] = {
    "paged_latent_attention": (FLASH_MLA, FLASH_ATTENTION_3, TRTLLM_GEN),
}
