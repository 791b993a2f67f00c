"""The shapes and dtypes of what the mla ops return, for tracing: symbolic sizes pass through.

Results are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register_fakes(library: torch.library.Library) -> None:
    """Register the fake of every mla op but `sealed_attention` and the backwards."""
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"mla::{name}", fake, lib=library)


def _latent_attention_fake(q_latent: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """The fake of every attention over latents: the shapes of its results depend on the query alone."""
    return q_latent.new_empty(q_latent.shape), q_latent.new_empty(q_latent.shape[:3], dtype=torch.float32)


def _expanded_attention_fake(
    q: Tensor, latent: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor, *others: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], w_uv.shape[1])), q.new_empty(q.shape[:3], dtype=torch.float32)


def _paged_expanded_attention_fake(
    q: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *others: Any,
    **named: Any,
) -> tuple[Tensor, Tensor]:
    return _expanded_attention_fake(q, latent_pages, rope_pages, w_uk, w_uv)


def _merge_states_fake(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)


def _append_latents_fake(*arguments: Any, **named: Any) -> None:
    return None


def _per_head_matmul_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:3], weight.shape[2]))


def _widened_matmul_fake(x: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[-1]), dtype=torch.promote_types(x.dtype, torch.float32))


def _grow_cache_fake(past: Tensor, new: Tensor, dim: int) -> Tensor:
    sizes = list(past.shape)
    sizes[dim] = sizes[dim] + new.shape[dim]
    return past.new_empty(sizes)


def _index_scores_fake(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    return weights.new_empty((q.shape[0], q.shape[1], k.shape[1]))


_FAKES: dict[str, Callable[..., Any]] = {
    "latent_attention": _latent_attention_fake,
    "paged_latent_attention": _latent_attention_fake,
    "sparse_latent_attention": _latent_attention_fake,
    "expanded_attention": _expanded_attention_fake,
    "paged_expanded_attention": _paged_expanded_attention_fake,
    "merge_states": _merge_states_fake,
    "append_latents": _append_latents_fake,
    "per_head_matmul": _per_head_matmul_fake,
    "widened_matmul": _widened_matmul_fake,
    "grow_cache": _grow_cache_fake,
    "index_scores": _index_scores_fake,
}
