"""MLA absorbed by hand in plain eager torch, as somebody who knows the layer would write it.

It takes the same module, arguments and cache as transformers' forward. Each stage is a function of its own, so that it
can be measured alone.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.cache.argument import cache_of


def project(attention: Any, hidden_states: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q_nope `[B, N, Sq, P]`, q_rope `[B, N, Sq, R]`, new latent `[B, 1, Sq, L]`, rope key `[B, 1, Sq, R]`."""
    batch, queries, _ = hidden_states.shape
    if attention.q_lora_rank is None:
        query = attention.q_proj(hidden_states)
    else:
        query = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(hidden_states)))
    query = query.view(batch, queries, attention.num_heads, -1).transpose(1, 2)
    q_nope, q_rope = query.split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], dim=-1)
    compressed = attention.kv_a_proj_with_mqa(hidden_states)[:, None]
    latent, rope_key = compressed.split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
    q_rope, rope_key = _rotate(attention, q_rope, rope_key, position_embeddings)
    return q_nope, q_rope, attention.kv_a_layernorm(latent), rope_key


def _rotate(attention: nn.Module, q_rope: Tensor, rope_key: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor]:
    """Apply the rope of the module's own model: complex factors in DeepSeek-V2, cosines and sines in V3."""
    model = sys.modules[type(attention).__module__]
    if isinstance(position_embeddings, Tensor):
        rotated = model.apply_rotary_emb(q_rope, rope_key, position_embeddings)
    else:
        rotated = model.apply_rotary_pos_emb_interleave(q_rope, rope_key, *position_embeddings)
    return rotated[0], rotated[1]


def absorb(attention: Any, q_nope: Tensor) -> Tensor:
    """`q_nope @ W_UK`: `[B, N, Sq, P] -> [B, N, Sq, L]`."""
    return q_nope @ _up_projection(attention)[:, : attention.qk_nope_head_dim]


def attend(
    attention: Any, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope_key: Tensor, mask: Tensor | None
) -> Tensor:
    """Attention in latent space, `[B, N, Sq, L]`; causal if there are several queries and no mask.

    One query uses two plain products with heads as rows. Several queries use SDPA, which computes scores block by
    block. Its fast CPU kernel needs keys and values of equal width, so the rope key stays in the values and is cut off
    the result.
    """
    queries = q_latent.shape[2]
    if queries == 1:
        q_latent, q_rope = q_latent.transpose(1, 2), q_rope.transpose(1, 2)  # [B, 1, N, L], [B, 1, N, R]
        scores = (q_latent @ latent.mT + q_rope @ rope_key.mT) * attention.scaling
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        attended: Tensor = scores.softmax(dim=-1) @ latent
        return attended.transpose(1, 2)
    keys = torch.cat((latent, rope_key), dim=-1)
    if mask is None:
        keys = keys[:, :, :queries]  # a static cache is longer than what was written to it
    keys = keys.expand(-1, attention.num_heads, -1, -1)
    out = F.scaled_dot_product_attention(
        torch.cat((q_latent, q_rope), dim=-1), keys, keys, mask, is_causal=mask is None, scale=attention.scaling
    )
    return out[..., : attention.kv_lora_rank]


def expand_values(attention: Any, o_latent: Tensor) -> Tensor:
    """`o_latent @ W_UV`: `[B, N, Sq, L] -> [B, N, Sq, V]`."""
    return o_latent @ _up_projection(attention)[:, attention.qk_nope_head_dim :].mT


def _up_projection(attention: Any) -> Tensor:
    weight: Tensor = attention.kv_b_proj.weight
    return weight.view(attention.num_heads, -1, attention.kv_lora_rank)


def output(attention: Any, heads: Tensor) -> Tensor:
    """`[B, N, Sq, V] -> [B, Sq, hidden]`."""
    out: Tensor = attention.o_proj(heads.transpose(1, 2).flatten(2))
    return out


def absorbed_by_hand(attention: Any, arguments: Mapping[str, Any]) -> Tensor:
    """The layer's output `[B, Sq, hidden]`; the cache in `arguments` is updated."""
    q_nope, q_rope, latent, rope_key = project(attention, arguments["hidden_states"], arguments["position_embeddings"])
    latent, rope_key = cache_of(arguments).update(latent, rope_key, attention.layer_idx)
    o_latent = attend(attention, absorb(attention, q_nope), q_rope, latent, rope_key, arguments["attention_mask"])
    return output(attention, expand_values(attention, o_latent))
