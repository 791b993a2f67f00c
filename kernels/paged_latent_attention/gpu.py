"""What CUDA and ROCm tensors get: the Triton kernel, which is imported at the first call.

ATen operations take over for float64 and for pages whose rows are not dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.suits import suits
from .arguments import check_arguments
from .aten import paged_latent_attention_aten


def paged_latent_attention_gpu(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    causal: bool,
    scale: float,
    latent_scales: Tensor | None = None,
    split_tokens: int | None = None,
    mask: Tensor | None = None,
    first_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla::paged_latent_attention`; see `mla_compile.ops` for shapes, dtypes and errors."""
    tensors = q_latent, q_rope, latent_pages, rope_pages, block_table, seq_lens
    rest = latent_scales, split_tokens, mask, first_positions
    check_arguments(*tensors, *rest)
    if not suits(q_latent, latent_pages, rope_pages):
        return paged_latent_attention_aten(*tensors, causal, scale, *rest)
    from .._common.machine import present
    from .triton import paged_latent_attention_triton

    with torch.cuda.device(q_latent.device):
        return paged_latent_attention_triton(*tensors, causal, scale, *rest, present(q_latent.device))


torch.library.impl("mla::paged_latent_attention", "CUDA")(paged_latent_attention_gpu)
