"""Gradients of `mla::latent_attention`: keys and values of all heads are the latents; see `kernels/backward`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attended import Attended
from ..backward import attend_backward
from ..bundles import checked, implement
from .arguments import LatentAttentionBackward

_WORKSPACE_TOKENS = 1024
"""The default of `mla.workspace_tokens`: room for the gradients of one head's keys and values for 4,096 tokens."""


def _backward(x: LatentAttentionBackward) -> list[Tensor]:
    q = torch.cat([x.q_latent, x.q_rope], dim=-1)
    wants_latent, wants_rope, *others, wants_mask = x.wanted
    found = attend_backward(
        Attended(
            *(x.grad_o, x.grad_lse, q, x.latent, x.k_rope, None, None),
            *(x.mask, x.causal_offset, x.scale, _WORKSPACE_TOKENS, x.o, x.lse),
            wanted=[wants_latent or wants_rope, *others, False, False, wants_mask],
        )
    )
    if not (wants_latent or wants_rope):
        return found
    parts = found.pop(0).split([x.q_latent.shape[3], x.q_rope.shape[3]], dim=-1)
    asked = (part.contiguous() for part, wants in zip(parts, x.wanted, strict=False) if wants)
    return [*asked, *found]


latent_attention_backward_aten = checked(LatentAttentionBackward, _backward)
implement("latent_attention_backward", "CompositeExplicitAutograd", latent_attention_backward_aten)
