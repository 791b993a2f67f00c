"""What the layers of a transformers model cache, as far as its config and transformers' own cache tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KEPT = {"DynamicSlidingWindowLayer", "LinearAttentionLayer"}
"""The classes of transformers' cache layers that may stand beside latent layers."""


def own_layers(config: Any) -> list[Any]:
    """The layers that transformers' own cache for a model has; none if `config` is not a transformers config."""
    try:
        from transformers import DynamicCache, PreTrainedConfig
    except ImportError:  # a model of another library
        return []
    return list(DynamicCache(config=config).layers) if isinstance(config, PreTrainedConfig) else []


def is_latents(layer: Any, *, indexers: bool) -> bool:
    """Whether a transformers cache layer keeps all tokens; with `indexers`, it may keep an indexer's keys as well."""
    return type(layer).__name__ in ("DynamicLayer", *(("DynamicIndexedLayer",) if indexers else ()))


def other_layers(layers: Sequence[Any], *, indexers: bool) -> list[str]:
    """The classes of cache layers that keep anything but all tokens (and, with `indexers`, an indexer's keys)."""
    return sorted({type(layer).__name__ for layer in layers if not is_latents(layer, indexers=indexers)})


def others_than_kept(layers: Sequence[Any], *, alone: bool) -> list[str]:
    """The classes of cache layers that a `PagedLatentCache` does not support. On one device and without a batch
    (`alone`), it supports more.

    States beside an indexer's keys (GLM-5-Next) are not supported, as such a model accesses its cache layers directly,
    and here latents have none.
    """
    if not alone:
        return other_layers(layers, indexers=False)
    others = other_layers(layers, indexers=True)
    indexed = others != other_layers(layers, indexers=False)
    return [name for name in others if name not in KEPT or (indexed and name == "LinearAttentionLayer")]


def sizes_of(config: Any, latents: Sequence[int]) -> tuple[int, int, int] | None:
    """The number of layers that keep latents (those in `latents`, if known), and the widths of a latent and a rope key.

    None if the configuration does not tell them, or they differ between layers.
    """
    count = len(latents) or getattr(config, "num_hidden_layers", None)
    each = getattr(config, "per_layer_config", None)
    configs = [each[i] for i in latents] if each else [config]
    widths = {(getattr(own, "kv_lora_rank", None), getattr(own, "qk_rope_head_dim", None)) for own in configs}
    if len(widths) != 1:
        return None
    ((latent, rope),) = widths
    return None if count is None or latent is None or rope is None else (int(count), int(latent), int(rope))
