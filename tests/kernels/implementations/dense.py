"""FlashMLA's dense decode as its C++ interface (csrc/api/dense_decode.h) checks and computes it, for the stand-ins."""

import torch

from mla_compile.kernels.paged_latent_attention import paged_latent_attention_reference


def attend(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal):
    """out `[B, Sq, N, 512]`, softmax_lse `[B, N, Sq]`, which is +inf where a row sees no key."""
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert k_cache.dtype == q.dtype
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    assert cache_seqlens.is_contiguous()
    assert block_table.stride(-1) == q.stride(-1) == k_cache.stride(-1) == 1
    assert (q.shape[3], head_dim_v, *k_cache.shape[1:]) == (576, 512, 64, 1, 576)
    pages, wide = k_cache[:, :, 0].float(), q.float()
    o, lse = paged_latent_attention_reference(
        *(wide[..., :512], wide[..., 512:], pages[..., :512], pages[..., 512:]),
        *(block_table, cache_seqlens, causal, softmax_scale),
    )
    lse = lse.transpose(1, 2).contiguous()
    return o.to(q.dtype), lse.masked_fill(lse == -torch.inf, torch.inf)
