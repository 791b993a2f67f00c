"""Describe calls of `mla::expanded_attention_backward`, and a small one for the trial."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from . import expansions
from .trial import normal_like

if TYPE_CHECKING:
    from ..attended import Attended

_NAMES = ("dq", "d_latent", "d_k_rope", "d_w_uk", "d_w_uv", "d_mask")


def problem_of(x: Attended) -> expansions.Expanded | None:
    """The problem of a call; None where sizes are symbols. All keys of a head are there at once, for ours too."""
    problem = expansions.Expanded.of(x)
    if problem is None:
        return None
    asked = {
        "a gradient of lse": x.grad_lse is not None,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    besides = *problem.besides, *(name for name, is_asked in asked.items() if is_asked)
    return dataclasses.replace(problem, fits=True, besides=besides)


def layout_of(x: Attended) -> Hashable:
    """Everything about the arguments that a choice may depend on."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return expansions.layout_of(x), tuple(x.wanted), x.grad_lse is None, deterministic


def results_of(x: Attended) -> tuple[str, ...]:
    """The names of the wanted gradients."""
    return tuple(name for name, asked in zip(_NAMES, x.wanted, strict=True) if asked)


def small(x: Attended) -> Attended:
    """All gradients of the small problem of the forward, whose results the op gives."""
    forward = expansions.small(x)
    with torch.no_grad():
        o, lse = torch.ops.mla.expanded_attention(
            *(forward.q, forward.latent, forward.k_rope, forward.w_uk, forward.w_uv, forward.mask),
            *(forward.causal_offset, forward.scale, forward.workspace_tokens),
        )
    grad_o = normal_like(x.q)(*o.shape)
    return dataclasses.replace(forward, grad_o=grad_o, o=o, lse=lse, wanted=[True] * 5 + [False])
