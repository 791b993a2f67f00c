"""The signatures of sgl_kernel 0.3 (flash_mla.py), which are those of FlashMLA's releases of 2025, in plain torch."""

from tests.kernels.implementations.dense import attend


def get_mla_metadata(
    cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None, is_fp8_kvcache=False, topk=None
):
    assert num_heads_k == 1
    return cache_seqlens.new_full((132, 8), num_q_tokens_per_head_k), cache_seqlens.new_zeros(len(cache_seqlens) + 1)


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits,
    softmax_scale=None,
    causal=False,
    descale_q=None,
    descale_k=None,
    is_fp8_kvcache=False,
    indices=None,
):
    assert (tile_scheduler_metadata == q.shape[1] * q.shape[2]).all()
    assert num_splits.shape == (len(cache_seqlens) + 1,)
    return attend(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal)
