"""cuDNN's attention, which ships with torch, over keys and values up-projected for a group of heads at a time.

    k, v   [H, b, T, P + R], [H, b, T, V]   the workspace, where the rope key is copied beside each head's part

cuDNN's causal limit lets query i see keys 0 to i. So the keys that all queries see take a call of their own, and the
two results, each rounded to the queries' dtype, are merged. lse is in natural logarithms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..share import in_even_groups, share_of
from ..two_latents import latents_of
from .expansions import Takes, tokens_of
from .implementation import Implementation

if TYPE_CHECKING:
    from ..expanded_attention.arguments import ExpandedAttention

_BYTES = 128 << 20
"""The most bytes of workspace at a time, as for the Triton kernel."""


def _attend(module: Any, x: ExpandedAttention) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = x.q.shape
    nope, columns, width = x.w_uk.shape[1], x.w_uv.shape[1], x.q.shape[3]
    tokens = tokens_of(x)
    share = share_of(batch, heads, tokens, x.workspace_tokens)
    each = share.sequences * tokens * (width + columns) * x.q.itemsize
    group = in_even_groups(share.heads, max(_BYTES // each, 1))
    o = x.q.new_empty((batch, queries, heads, columns))
    lse = x.q.new_empty((batch, queries, heads), dtype=torch.float32)
    for b in range(0, batch, share.sequences):
        latent, ropes = (t[b : b + share.sequences, :tokens] for t in (x.latent, x.ropes))
        of_keys, of_values = (t.flatten(0, 1)[None] for t in latents_of(latent, x.w_uk, x.w_uv))
        for head in range(0, heads, group):
            part = slice(b, b + share.sequences), slice(None), slice(head, head + group)
            w_uk, w_uv = x.w_uk[part[2]], x.w_uv[part[2]]
            k = x.q.new_empty((len(w_uk), of_keys.shape[1], width))
            torch.bmm(of_keys.expand(len(w_uk), -1, -1), w_uk.mT, out=k[..., :nope])
            own = ropes if ropes.shape[2] == 1 else ropes[:, :, part[2]]
            k[..., nope:] = own.reshape(k.shape[1], -1, width - nope).transpose(0, 1)
            v = torch.bmm(of_values.expand(len(w_uv), -1, -1), w_uv.mT)
            k, v = (t.unflatten(1, latent.shape[:2]).transpose(0, 1) for t in (k, v))
            o[part], lse[part] = _attend_to(module.ops.aten, x.q[part], k, v, x.causal_offset, x.scale)
    return o, lse


def _attend_to(
    aten: Any, q: Tensor, k: Tensor, v: Tensor, causal_offset: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """o `[b, Sq, H, V]` and lse `[b, Sq, H]` over keys `[b, H, T, P + R]` and values `[b, H, T, V]`."""
    cut = min(causal_offset or 0, k.shape[2])
    results = []
    for keys, causal in ((slice(0, cut), False), (slice(cut, None), causal_offset is not None)):
        if k[:, :, keys].shape[2] == 0:
            continue
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            *(q.transpose(1, 2), k[:, :, keys], v[:, :, keys], None, True, 0.0, causal, False), scale=scale
        )
        results.append((o.transpose(1, 2), lse.reshape(o.shape[:3]).transpose(1, 2)))
    if len(results) == 1:
        return results[0]
    merged: tuple[Tensor, Tensor] = torch.ops.mla.merge_states(*(t.contiguous() for pair in results for t in pair))
    return merged


CUDNN = Implementation(
    name="cuDNN",
    homes=("torch",),
    functions=(),
    attend=_attend,
    architectures=("sm_90", "sm_100", "sm_103"),
    limits=Takes(dtypes=(torch.bfloat16, torch.float16), widths=(128, 64, 128)),
)
