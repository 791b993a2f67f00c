"""Absorbed MLA over named keys in FP8 or INT8 on Hopper, in Gluon: launch `warp_groups`, then `combine` what was cut.

q_latent [B, Sq, N, 512], q_rope [B, Sq, N, 64], bfloat16
latent [B, T, 512] FP8 or INT8, k_rope [B, T, 64] bfloat16, rows at multiples of 16 bytes
indices [B, Sq, topk]
latent_scales [B, T, G] with G of 1, 2 or 4, float32
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.addresses import aligned
from .._common.machine import Machine, present
from .._common.plans import Plans, layout
from ..paged_latent_attention.gluon import LAUNCHED, Plan, Shared, plan_of, results_for
from .arguments import SparseLatentAttention
from .aten import finished
from .warp_groups import attend_named

_AT_ONCE = 8
"""Numbers of 16 bits that are copied at a time, in units of which rows are apart."""
_PLANS = Plans[Plan]()


def sparse_latent_attention_gluon(x: SparseLatentAttention, machine: Machine | None = None) -> tuple[Tensor, Tensor]:
    """o and lse, on a machine (by default the present one), for problems that the implementation's `Takes` accepts."""
    machine = machine or present(x.q_latent.device)
    assert x.latent_scales is not None
    batch, queries, heads, _ = x.q_latent.shape
    named = x.indices.shape[2]
    o, lse = results_for(x.q_latent)
    if lse.numel() == 0 or x.latent.numel() == 0 or named == 0:
        return finished(x, o.zero_(), lse.fill_(-torch.inf))
    # Each query is a sequence of its own.
    q_latent, q_rope = (aligned(q.flatten(0, 1)) for q in (x.q_latent, x.q_rope))
    groups = x.latent_scales.shape[2]
    key = machine, layout(q_latent), x.latent.dtype, groups
    plan = _PLANS.get(key, lambda: plan_of(machine, batch * queries, heads, x.latent.dtype, groups))
    lengths = torch.full((batch * queries,), named, dtype=torch.int32, device=lse.device)
    shared = Shared(plan, lse, lengths, 1, heads, named)
    words, scales = x.latent.view(torch.int16), x.latent_scales.expand(*x.latent.shape[:2], -1)
    rows = (step // _AT_ONCE for keys in (words, x.k_rope) for step in keys.stride()[:2])
    attend_named[(plan.work.programs,)](
        *(q_latent, q_rope, words, x.k_rope, scales, x.indices, lengths, shared.pieces, o, lse, *shared.partial),
        *(x.scale, queries, heads, named, plan.own[2], x.latent.shape[1], x.causal_offset or 0),
        *(*q_latent.stride()[:2], *q_rope.stride()[:2], *rows, *scales.stride(), *x.indices.stride()),
        CAUSAL=x.causal_offset is not None,
        **plan.constants,
        **LAUNCHED,
    )
    shared.combine(o, lse)
    return finished(x, o, lse)
