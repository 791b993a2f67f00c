"""The ops that kernels other than their own may compute, and their implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import expansions, pages
from .cudnn import CUDNN
from .flash_attention_3 import FLASH_ATTENTION_3
from .flash_mla import FLASH_MLA
from .flashinfer import TRTLLM_GEN
from .gluon import TENSOR_MEMORY, WARP_GROUPS
from .implementation import Op

if TYPE_CHECKING:
    from ..expanded_attention.arguments import ExpandedAttention
    from ..paged_latent_attention.arguments import PagedLatentAttention

PAGED: Op[PagedLatentAttention] = Op(
    name="paged_latent_attention",
    implementations=(FLASH_MLA, FLASH_ATTENTION_3, TRTLLM_GEN, WARP_GROUPS, TENSOR_MEMORY),
    problem_of=pages.Paged.of,
    layout_of=pages.layout_of,
    sizes_of=pages.sizes_of,
    small=pages.small,
)
EXPANDED: Op[ExpandedAttention] = Op(
    name="expanded_attention",
    implementations=(CUDNN,),
    problem_of=expansions.Expanded.of,
    layout_of=expansions.layout_of,
    sizes_of=expansions.sizes_of,
    small=expansions.small,
)
