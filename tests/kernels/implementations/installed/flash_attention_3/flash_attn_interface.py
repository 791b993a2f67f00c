"""The signature of FlashAttention 3 at 01afd16 (hopper/flash_attn_interface.py), what it checks, and what it gives."""

import torch

from mla_compile.kernels.paged_latent_attention import paged_latent_attention_reference


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert (k_cache.shape[2:], v_cache.shape[2:], q.shape[3], qv.shape[3]) == ((1, 64), (1, 512), 64, 512)
    assert page_table.dtype == cache_seqlens.dtype == torch.int32
    assert return_softmax_lse
    for t in (q, qv, k_cache, v_cache):  # by TMA, or 16 bytes at a time
        assert t.data_ptr() % 16 == 0
        assert all(
            stride * t.itemsize % 16 == 0 for size, stride in zip(t.shape[:-1], t.stride(), strict=False) if size > 1
        )
    tensors = qv, q, v_cache[:, :, 0], k_cache[:, :, 0]
    o, lse = paged_latent_attention_reference(
        *(tensor.float() for tensor in tensors), page_table, cache_seqlens, causal, softmax_scale
    )
    return o.to(q.dtype), lse.transpose(1, 2).contiguous()
