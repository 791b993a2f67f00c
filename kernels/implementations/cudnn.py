"""cuDNN's attention, which ships with torch, over keys and values up-projected for a group of heads at a time.

    k, v   [H, b, T, P + R], [H, b, T, V]   the workspace, where the rope key is copied beside each head's part

cuDNN's causal limit lets query i see keys 0 to i. So the keys that all queries see take a call of their own, and the
two results, each rounded to the queries' dtype, are merged. lse is in natural logarithms. `cudnn_backward` has the
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._common.addresses import aligned
from ..share import PROGRAMS, in_even_groups, share_of
from ..two_latents import latents_of
from .expansions import MANY, Expanded, Takes, parts_of, tokens_of
from .implementation import Implementation

if TYPE_CHECKING:
    from ..expanded_attention.arguments import ExpandedAttention

_VERSION = 91501
"""9.15.1. Before, it may access memory out of bounds where a length is not divisible by 128 (pytorch#169849); torch's
own SDPA does not prefer cuDNN then either."""


@dataclass(frozen=True)
class _Corrected(Takes):
    """Also requires a version of cuDNN."""

    def refusal(self, problem: Expanded) -> str | None:
        found = torch.backends.cudnn.version() or 0
        if found < _VERSION:
            return f"has to be 9.15.1 or later, found {found // 10000}.{found // 100 % 100}.{found % 100}"
        return super().refusal(problem)


TAKES = _Corrected(dtypes=(torch.bfloat16, torch.float16), widths=(128, 64, 128))
ARCHITECTURES = ("sm_90", "sm_100", "sm_103")
_BYTES = 128 << 20
"""The most bytes of workspace at a time, as for the Triton kernel."""
_ROWS = 128
"""Queries of a head in a program."""
_PROCESSORS = 132
"""An H100's and an H200's, on which it was measured; the limit of heads at a time was not tried on others."""


def _attend(module: Any, x: ExpandedAttention) -> tuple[Tensor, Tensor]:
    batch, queries, heads, width = x.q.shape
    columns, tokens, q = x.w_uv.shape[1], tokens_of(x), aligned(x.q)
    share = share_of(batch, heads, tokens, x.workspace_tokens)
    each = share.sequences * tokens * (width + columns) * q.itemsize
    most = min(max(share.heads, fewest_heads(share.sequences, queries)), _BYTES // each)
    group = in_even_groups(heads, max(most, 1))
    o = q.new_empty((batch, queries, heads, columns))
    lse = q.new_empty((batch, queries, heads), dtype=torch.float32)
    for b in range(0, batch, share.sequences):
        latent, ropes = (t[b : b + share.sequences, :tokens] for t in (x.latent, x.ropes))
        for head in range(0, heads, group):
            part = slice(b, b + share.sequences), slice(None), slice(head, head + group)
            own = ropes if ropes.shape[2] == 1 else ropes[:, :, part[2]]
            k, v = expanded(*latents_of(latent, x.w_uk, x.w_uv), own, x.w_uk[part[2]], x.w_uv[part[2]])
            o[part], lse[part] = _attend_to(module.ops.aten, q[part], k, v, x.causal_offset, x.scale)
    return o, lse


def fewest_heads(sequences: int, queries: int) -> int:
    """The fewest heads of some sequences that keep the device busy."""
    return -(-PROGRAMS * _PROCESSORS // (sequences * -(-queries // _ROWS)))


def expanded(of_keys: Tensor, of_values: Tensor, ropes: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys `[b, H, T, P + R]` and values `[b, H, T, V]`, the heads outermost in memory.

    of_keys `[b, T, Lk]`, of_values `[b, T, Lv]`, ropes `[b, T, 1 or H, R]`, w_uk `[H, P, Lk]`, w_uv `[H, V, Lv]`.
    """
    (heads, nope, _), rope, sizes = w_uk.shape, ropes.shape[3], of_keys.shape[:2]
    rows = of_keys.flatten(0, 1)
    k = rows.new_empty((heads, rows.shape[0], nope + rope))
    torch.bmm(rows.expand(heads, -1, -1), w_uk.mT, out=k[..., :nope])
    k[..., nope:] = ropes.flatten(0, 1).transpose(0, 1)
    v = torch.bmm(of_values.flatten(0, 1).expand(heads, -1, -1), w_uv.mT)
    return k.unflatten(1, sizes).transpose(0, 1), v.unflatten(1, sizes).transpose(0, 1)


def _attend_to(
    aten: Any, q: Tensor, k: Tensor, v: Tensor, causal_offset: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """o `[b, Sq, H, V]` and lse `[b, Sq, H]` over keys `[b, H, T, P + R]` and values `[b, H, T, V]`."""
    results = []
    for keys, causal in parts_of(causal_offset, k.shape[2]):
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
    architectures=ARCHITECTURES,
    limits=TAKES,
    # On an H200 it takes 0.82 of the Triton kernel's time for 128 heads and 4,096 tokens, and 0.66 for 16 and 16,384.
    first_on=("sm_90",),
    first_from=MANY,
)
