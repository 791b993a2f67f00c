"""The ops that kernels other than their own may compute, and their implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import expansions, gradients, named, pages
from .cudnn import CUDNN
from .cudnn_backward import CUDNN_BACKWARD
from .flash_attention_3 import FLASH_ATTENTION_3
from .flash_mla import FLASH_MLA
from .flashinfer import TRTLLM_GEN
from .gluon import CLUSTERS, HOPPER, HOPPER_NAMED, TENSOR_MEMORY
from .implementation import Op

if TYPE_CHECKING:
    from ..attended import Attended
    from ..expanded_attention.arguments import ExpandedAttention
    from ..paged_latent_attention.arguments import PagedLatentAttention
    from ..sparse_latent_attention.arguments import SparseLatentAttention

PAGED: Op[PagedLatentAttention] = Op(
    name="paged_latent_attention",
    implementations=(FLASH_MLA, FLASH_ATTENTION_3, TRTLLM_GEN, CLUSTERS, HOPPER, TENSOR_MEMORY),
    problem_of=pages.Paged.of,
    layout_of=pages.layout_of,
    sizes_of=pages.sizes_of,
    small=pages.small,
)
NAMED: Op[SparseLatentAttention] = Op(
    name="sparse_latent_attention",
    implementations=(HOPPER_NAMED,),
    problem_of=named.Named.of,
    layout_of=named.layout_of,
    sizes_of=named.sizes_of,
    small=named.small,
)
EXPANDED: Op[ExpandedAttention] = Op(
    name="expanded_attention",
    implementations=(CUDNN,),
    problem_of=expansions.Expanded.of,
    layout_of=expansions.layout_of,
    sizes_of=expansions.sizes_of,
    small=expansions.small,
)
GRADIENTS: Op[Attended] = Op(
    name="expanded_attention_backward",
    implementations=(CUDNN_BACKWARD,),
    problem_of=gradients.problem_of,
    layout_of=gradients.layout_of,
    sizes_of=expansions.sizes_of,
    small=gradients.small,
    results_of=gradients.results_of,
)
