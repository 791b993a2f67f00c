"""FlashAttention 3 for Hopper (github.com/Dao-AILab/flash-attention, `hopper/`), which SGLang ships too.

From its sources: scores are q k^T + qv v^T, with the rope key as k and the latent as v, which need not be side by side;
pages may have any size; table and lengths are int32; a causal limit ends at the last key; lse is `[B, N, Sq]`, in
natural logarithms. Not known from the sources: whether what lies after the last key is multiplied. The trial tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._common.addresses import aligned
from .implementation import Function, Implementation
from .pages import Paged, Takes, by_query, numbers_of

if TYPE_CHECKING:
    from ..paged_latent_attention.arguments import PagedLatentAttention


@dataclass(frozen=True)
class _Aligned(Takes):
    """Requires rows that can be loaded 16 bytes at a time or by TMA."""

    def refusal(self, problem: Paged) -> str | None:
        why = super().refusal(problem)
        if why is None and not problem.aligned:
            return "takes latents and rope keys in rows at multiples of 16 bytes, found another layout"
        return why


def _attend(module: Any, x: PagedLatentAttention) -> tuple[Tensor, Tensor]:
    table, lengths = numbers_of(x)
    o, lse, *_ = module.flash_attn_with_kvcache(
        q=aligned(x.q_rope),
        k_cache=x.rope_pages[:, :, None],
        v_cache=x.latent_pages[:, :, None],
        qv=aligned(x.q_latent),
        cache_seqlens=lengths,
        page_table=table,
        softmax_scale=x.scale,
        causal=x.causal and x.q_latent.shape[1] > 1,
        return_softmax_lse=True,
    )
    return o.contiguous(), by_query(lse)


FLASH_ATTENTION_3 = Implementation(
    name="FlashAttention 3",
    homes=("flash_attn_interface", "sgl_kernel.flash_attn"),
    functions=(
        Function(
            "flash_attn_with_kvcache",
            (
                "q",
                "k_cache",
                "v_cache",
                "qv",
                "cache_seqlens",
                "page_table",
                "softmax_scale",
                "causal",
                "return_softmax_lse",
            ),
        ),
    ),
    attend=_attend,
    architectures=("sm_90",),
    limits=_Aligned(dtypes=(torch.bfloat16, torch.float16), widths=(512, 64), one_row=False),
)
