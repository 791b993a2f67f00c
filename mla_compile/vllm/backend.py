"""The backend with vLLM's interface. Importing this module imports vLLM."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    split_kv_b_proj,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType, MultipleOf

from . import NAME, context_parallel
from .pages import attend, attend_to_prompts, write


class MLACompileBackend(MLACommonBackend):
    """What the backend supports: caches in the model's dtype, with pages of any multiple of 16 tokens."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        """The backend's name in vLLM's messages."""
        return NAME

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Empty, so any head size (L + R) is supported."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """The supported numbers of tokens per page."""
        return [MultipleOf(16)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether pages may have this number of tokens."""
        return block_size is None or block_size % 16 == 0

    @staticmethod
    def get_impl_cls() -> type[MLACompileImpl]:
        """The class that runs a layer."""
        return MLACompileImpl


class MLACompileImpl(MLACommonImpl[MLACommonMetadata]):
    """Attention and cache writes of one layer. On a GPU, and where ranks share out tokens, prefill is vLLM's own."""

    can_return_lse_for_decode: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **sizes: Any,
    ) -> None:
        asked = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        if given := [name for name, value in asked.items() if value]:
            raise NotImplementedError(f"{NAME}: expected plain causal attention, found {', '.join(given)}")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"{NAME}: expected a decoder's self-attention, found {attn_type}")
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **sizes,
        )
        self.supports_quant_query_input = False
        if self.dcp_world_size > 1:
            context_parallel.install()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Keep the up-projections of keys `[N, P, L]` and values `[N, V, L]`, for prompts on a CPU."""
        super().process_weights_after_loading(act_dtype)
        if current_platform.is_cpu():
            sizes = self.kv_lora_rank, self.num_heads, self.qk_nope_head_dim, self.v_head_dim
            w_uk, w_uv = split_kv_b_proj(self.kv_b_proj, act_dtype, *sizes)
            self.up_projections = w_uk.permute(1, 2, 0), w_uv.permute(1, 2, 0)

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Attend by tokens of prompts `[tokens, N, P + R]`, which the cache has already: output `[tokens, N * V]`."""
        if not q.is_cpu or self.dcp_world_size > 1 or output_scale is not None:
            own = kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale
            super().forward_mha(q, kv_c_normed, k_pe, *own)
            return
        prefill = attn_metadata.prefill
        counts, context = prefill.query_start_loc.diff().tolist(), prefill.chunked_context
        before = [0] * len(counts) if context is None else context.context_lens_list
        table, (w_uk, w_uv) = prefill.block_table, self.up_projections
        attend_to_prompts(q, kv_c_and_k_pe_cache, table, counts, before, w_uk, w_uv, self.scale, output)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor]:
        """Attend by absorbed queries `[B, N, L + R]`, or their two parts, to the cache: o `[B, N, L]`, lse `[B, N]`."""
        decode = attn_metadata.decode
        joined = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        return attend(joined, kv_c_and_k_pe_cache, decode.block_table, decode.seq_lens, self.kv_lora_rank, self.scale)

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        """Write latents `[tokens, L]` and rope keys `[tokens, 1, R]` to their slots."""
        if kv_cache.numel():
            write(kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping.flatten())
