"""What CUDA and ROCm tensors get: library products and Triton kernels, which are imported at the first call.

ATen operations take over for float64 and for pages whose rows are not dense, and a mask whose elements are too far
apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.suits import small, suits
from ..pages import Pages
from .arguments import check_arguments
from .aten import paged_expanded_attention_aten


def paged_expanded_attention_gpu(
    q: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    causal: bool,
    scale: float,
    workspace_tokens: int,
    latent_scales: Tensor | None = None,
    mask: Tensor | None = None,
    first_positions: Tensor | None = None,
    query_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla::paged_expanded_attention`; see `mla_compile.ops` for shapes, dtypes and errors."""
    pages = Pages(latent_pages, rope_pages, block_table, seq_lens, latent_scales)
    rest = mask, first_positions, query_lens
    if not small(mask) or not suits(q, latent_pages, rope_pages):
        tensors = q, latent_pages, rope_pages, block_table, seq_lens, w_uk, w_uv
        return paged_expanded_attention_aten(*tensors, causal, scale, workspace_tokens, latent_scales, *rest)
    check_arguments(q, pages, w_uk, w_uv, workspace_tokens, *rest)
    from .._common.machine import present
    from .triton import paged_expanded_attention_triton

    with torch.cuda.device(q.device):
        return paged_expanded_attention_triton(
            q, pages, w_uk, w_uv, causal, scale, workspace_tokens, *rest, present(q.device)
        )


torch.library.impl("mla::paged_expanded_attention", "CUDA")(paged_expanded_attention_gpu)
