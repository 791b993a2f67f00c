"""The signature of flashinfer-python 0.7.2.post1 (flashinfer/mla/_core.py), what it checks, and what it gives."""

import torch

from mla_compile.kernels.paged_latent_attention import paged_latent_attention_reference


def trtllm_batch_decode_with_kv_cache_mla(
    query,
    kv_cache,
    workspace_buffer,
    qk_nope_head_dim,
    kv_lora_rank,
    qk_rope_head_dim,
    block_tables,
    seq_lens,
    max_seq_len,
    sparse_mla_top_k=0,
    out=None,
    bmm1_scale=1.0,
    bmm2_scale=1.0,
    sinks=None,
    skip_softmax_threshold_scale_factor=None,
    enable_pdl=None,
    backend="auto",
    is_var_seq=True,
    uses_shared_paged_kv_idx=True,
    lse=None,
    return_lse=False,
    cute_dsl_impl="auto",
    kv_scale_format="auto",
    cum_seq_lens_q=None,
    max_q_len=None,
    multi_ctas_kv_counter_buffer=None,
    sparse_mla_top_k_lens=None,
    enable_dcp=False,
    cp_world=1,
    cp_rank=0,
    causal_seqlens_kv_global=None,
    use_fp16_softmax=None,
    return_lse_base=None,
):
    assert (query.dim(), query.shape[1], kv_lora_rank, qk_rope_head_dim) == (4, 1, 512, 64)
    assert kv_cache.shape[1:] in ((32, 576), (64, 576))
    assert not workspace_buffer.any()
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert max_seq_len >= seq_lens.max()
    assert (backend, bmm2_scale, return_lse) == ("trtllm-gen", 1.0, True)
    pages, wide = kv_cache.float(), query.float()
    o, natural = paged_latent_attention_reference(
        *(wide[..., :512], wide[..., 512:], pages[..., :512], pages[..., 512:]),
        *(block_tables, seq_lens, True, bmm1_scale),
    )
    base = {"basee": 1.0, "base2": 0.6931471805599453, None: 0.6931471805599453}[return_lse_base]
    return o.to(query.dtype), (natural / base).flatten(0, 1)
