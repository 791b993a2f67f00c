"""Workloads: the tensors of one call of the layer, and the lower bound on its time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from mla_compile.bench.layers import Built, Layer
from mla_compile.cache.argument import cache_argument
from mla_compile.cost import Cost, Device, Dims, predicted_seconds
from mla_compile.passes.paths.absorbed import absorbed_cost
from mla_compile.passes.paths.as_written import expanded_cost

CacheKind = Literal["dynamic", "static"]


@dataclass(frozen=True)
class Workload:
    """One call of the layer for one sequence."""

    kind: Literal["decode", "prefill"]
    tokens: int
    """decode: the cached tokens before the single query token; prefill: the prompt tokens, with an empty cache."""

    def __str__(self) -> str:
        return f"decode at context {self.tokens}" if self.kind == "decode" else f"prefill of {self.tokens} tokens"

    @property
    def queries(self) -> int:
        """`Sq`."""
        return 1 if self.kind == "decode" else self.tokens

    @property
    def context(self) -> int:
        """The number of tokens in the cache before the call."""
        return self.tokens if self.kind == "decode" else 0

    @property
    def keys(self) -> int:
        """`T`."""
        return self.context + self.queries

    def dims(self, layer: Layer) -> Dims:
        return Dims(1, self.queries, self.keys, layer.N, layer.L, layer.P, layer.R, layer.V)


@dataclass(frozen=True)
class Inputs:
    """Arguments of the attention module. Each call gets a new cache, so that all calls see the same context."""

    hidden_states: torch.Tensor
    """`[1, Sq, hidden]`"""
    position_embeddings: Any
    attention_mask: torch.Tensor | None
    fresh_cache: Callable[[], Any]
    cache_argument: str
    """By which name the module takes its cache."""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for one call."""
        return {
            "hidden_states": self.hidden_states,
            "position_embeddings": self.position_embeddings,
            "attention_mask": self.attention_mask,
            self.cache_argument: self.fresh_cache(),
        }


def make_inputs(
    built: Built,
    workload: Workload,
    cache_kind: CacheKind,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Inputs:
    """Make random hidden states and cached latents of unit variance, with transformers' own mask and rope.

    A static cache is exactly as long as the workload needs. The random numbers do not depend on `dtype` (default: the
    layer's): they are rounded to the layer's dtype first.
    """
    from transformers import DynamicCache, StaticCache
    from transformers.masking_utils import create_causal_mask

    layer, generator = built.layer, torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, layer.torch_dtype).to(dtype or layer.torch_dtype)

    hidden_states = random(1, workload.queries, layer.hidden)
    latent, rope_key = random(1, 1, workload.context, layer.L), random(1, 1, workload.context, layer.R)

    def dynamic_cache() -> Any:
        cache = DynamicCache(config=built.config)
        if workload.context:
            cached: Any = cache.layers[0]
            cached.lazy_initialization(latent, rope_key)
            cached.keys, cached.values = latent, rope_key  # `update` replaces these and never writes to them
        return cache

    static = StaticCache(config=built.config, max_cache_len=workload.keys)
    buffers: Any = static.layers[0]
    buffers.lazy_initialization(latent, rope_key)

    def static_cache() -> Any:
        buffers.keys[:, :, : workload.context], buffers.keys[:, :, workload.context :] = latent, 0
        buffers.values[:, :, : workload.context], buffers.values[:, :, workload.context :] = rope_key, 0
        buffers.cumulative_length.fill_(workload.context)
        return static

    fresh_cache = static_cache if cache_kind == "static" else dynamic_cache
    position_ids = torch.arange(workload.context, workload.keys, device=device)[None]
    mask: Any = create_causal_mask(
        config=built.config,
        inputs_embeds=hidden_states,
        attention_mask=None,
        position_ids=position_ids,
        **{cache_argument(create_causal_mask): fresh_cache()},
    )
    rope, name = built.rotary(hidden_states, position_ids), cache_argument(built.attention.forward)
    return Inputs(hidden_states, rope, mask, fresh_cache, name)


def limit(attention: nn.Module, layer: Layer, workload: Workload, device: Device) -> float:
    """The lower bound on the call's seconds at the device's rates.

    Bytes: every weight, the latent cache, input and output once. FLOPs: all projections, and for attention the cheaper
    of absorbing and expanding, where only the pairs that the causal mask leaves are counted.
    """
    dims = workload.dims(layer)
    weights = sum(weight.numel() for weight in attention.parameters())
    up_projection = layer.N * layer.L * (layer.P + layer.V)  # already counted by both costs
    matrices = sum(weight.numel() for weight in attention.parameters() if weight.dim() == 2)
    size = layer.torch_dtype.itemsize
    attending = min(cost(dims, size, causal=True).flops for cost in (absorbed_cost, expanded_cost))
    flops = attending + 2 * workload.queries * (matrices - up_projection)
    elements = weights + workload.keys * (layer.L + layer.R) + 2 * workload.queries * layer.hidden
    return predicted_seconds(Cost(flops, size * elements), device)
