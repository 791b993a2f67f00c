"""The signatures of FlashMLA at 9241ae3 (flash_mla_interface.py), what it checks, and what it gives, in plain torch."""

import dataclasses

from tests.kernels.implementations.dense import attend


@dataclasses.dataclass
class FlashMLASchedMeta:
    have_initialized: bool = False
    config: object = None
    tile_scheduler_metadata: object = None
    num_splits: object = None


def get_mla_metadata(*args, **kwargs):
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    is_fp8_kvcache=False,
    indices=None,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    topk_length=None,
    extra_topk_length=None,
):
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta)
    assert num_splits is None
    assert not tile_scheduler_metadata.have_initialized, "a schedule is of the lengths that it was made for"
    tile_scheduler_metadata.have_initialized = True
    return attend(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal)
