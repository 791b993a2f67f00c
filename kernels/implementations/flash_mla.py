"""FlashMLA's dense decode (github.com/deepseek-ai/FlashMLA), which SGLang and vLLM ship too.

From its sources: it takes bfloat16 and float16 on sm_90, widths 512 and 64, pages of 64 tokens, and int32 table and
lengths; a causal limit ends at the last key; lse is `[B, N, Sq]`, in natural logarithms, +inf for a row that sees no
key; what lies after the last key is not multiplied. The call itself makes the schedule, on the device (in earlier
releases `get_mla_metadata` did).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .implementation import Function, Implementation
from .pages import Takes, by_query, numbers_of, rows_of

if TYPE_CHECKING:
    from ..paged_latent_attention.arguments import PagedLatentAttention


def _attend(module: Any, x: PagedLatentAttention) -> tuple[Tensor, Tensor]:
    _, queries, heads, rank = x.q_latent.shape
    table, lengths = numbers_of(x)
    schedule, splits = module.get_mla_metadata(lengths, queries * heads, 1)
    o, lse = module.flash_mla_with_kvcache(
        q=torch.cat([x.q_latent, x.q_rope], dim=-1),
        k_cache=rows_of(x)[:, :, None],
        block_table=table,
        cache_seqlens=lengths,
        head_dim_v=rank,
        tile_scheduler_metadata=schedule,
        num_splits=splits,
        softmax_scale=x.scale,
        causal=x.causal and queries > 1,
    )
    return o.contiguous(), by_query(lse)


FLASH_MLA = Implementation(
    name="FlashMLA",
    homes=("flash_mla", "sgl_kernel.flash_mla", "vllm.third_party.flashmla.flash_mla_interface"),
    functions=(
        Function("get_mla_metadata", positional=3),
        Function(
            "flash_mla_with_kvcache",
            (
                "q",
                "k_cache",
                "block_table",
                "cache_seqlens",
                "head_dim_v",
                "tile_scheduler_metadata",
                "num_splits",
                "softmax_scale",
                "causal",
            ),
        ),
    ),
    attend=_attend,
    architectures=("sm_90",),
    limits=Takes(dtypes=(torch.bfloat16, torch.float16), widths=(512, 64), page_sizes=(64,)),
    # Its authors report 660 TFLOP/s and 3,000 GB/s on an H800, for the main kernel and 128 heads. A program takes 64
    # rows.
    first_on=("sm_90",),
    first_from=64,
)
