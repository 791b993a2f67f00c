"""The gradients of attention by cuDNN, which ships with torch, a group of heads at a time.

    k, dk; v, dv   [H, b, T, P + R]; [H, b, T, V]     keys with the rope key beside each head's part

A score's gradient depends on other keys only through o and lse of the whole row. So where the keys are cut as in
`cudnn`, each part gets these, its keys have their gradients from its call alone, and those of the queries add up.

torch keeps a plan for each layout of q, k and v, and does not look whether o and its gradient have the strides that the
plan was made for. So they always have the same ones here, and the keys an order that no other caller is likely to use.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._common.addresses import aligned
from ..head_groups import Group, attend_backward_in_groups, busy_groups
from .cudnn import ARCHITECTURES, TAKES, expanded, fewest_heads
from .expansions import MANY, parts_of
from .implementation import Implementation

if TYPE_CHECKING:
    from ..attended import Attended


def _attend_backward(module: Any, x: Attended) -> list[Tensor]:
    aten, queries = module.ops.aten, x.q.shape[1]
    unused = torch.empty((), dtype=torch.int64, device=x.q.device)  # the state of a dropout that there is not
    q, do, o = (aligned(t.contiguous()) for t in (x.q, x.grad_o, x.o))

    def attend(group: Group, dq: Tensor, keys_too: bool) -> tuple[Tensor, Tensor, Tensor]:
        k, v = expanded(group.of_keys, group.of_values, group.ropes, group.w_uk, group.w_uv)
        do, q, o = (t.transpose(1, 2) for t in (group.do, group.q, group.o))
        lse = group.lse.transpose(1, 2).contiguous()[..., None]  # [b, H, Sq, 1]
        found = []
        for keys, causal in parts_of(group.causal_offset, k.shape[2]):
            part = k[:, :, keys], v[:, :, keys]
            # After the states: neither a bias nor the ends of packed sequences.
            rest = unused, unused, None, None, None, queries, part[0].shape[2], 0.0, causal
            call = do, q, *part, o, lse, *rest
            found.append(aten._scaled_dot_product_cudnn_attention_backward(*call, scale=group.scale))
        dqs, dks, dvs = zip(*found, strict=True)
        dq.copy_(reduce(torch.add, dqs).transpose(1, 2))
        dk, dv = (ts[0] if len(ts) == 1 else torch.cat(ts, dim=2) for ts in (dks, dvs))
        dk_nope, dk_rope = dk.transpose(1, 2).split([group.w_uk.shape[1], group.ropes.shape[3]], dim=-1)
        return dk_nope, dk_rope, dv.transpose(1, 2)

    def fewest(sequences: int, tokens: int) -> int:
        return fewest_heads(sequences, queries)

    return attend_backward_in_groups(replace(x, q=q, grad_o=do, o=o), attend, busy_groups(fewest))


CUDNN_BACKWARD = Implementation(
    name="cuDNN",
    homes=("torch",),
    functions=(),
    attend=_attend_backward,
    architectures=ARCHITECTURES,
    limits=TAKES,
    # On an H200 forward and backward take 0.62 of the Triton kernels' time for 128 heads and 4,096 tokens.
    first_on=("sm_90",),
    first_from=MANY,
)
