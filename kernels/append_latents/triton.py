"""Quantising into a cache on a GPU: a program for each group of columns of a token, and one for its rope key."""

from __future__ import annotations

from functools import cache

import torch

from ...fp8 import RowLayout
from .._common.tiles import power_of_two
from .arguments import AppendLatents
from .kernel import append


def append_latents_triton(x: AppendLatents) -> None:
    """Write to `x.rows`."""
    latent, k_rope, rows, scale = x.latent, x.k_rope, x.rows, x.scale
    tokens, rank = latent.shape
    rope = k_rope.shape[1]
    layout = RowLayout(rank, rope, k_rope.dtype)
    if scale is None:
        numbers, scales, rope_out = layout.views(rows)
        groups = layout.groups
    else:
        numbers, scales, rope_out = rows[..., :rank], rows[..., :0], rows[..., rank:].view(torch.uint8)
        groups = 1
    if tokens == 0:
        return
    append[(tokens, groups + (rope > 0))](
        latent,
        k_rope,
        x.slots.contiguous(),
        numbers.view(torch.uint8),
        latent if scale is not None else scales,
        rope_out,
        latent if scale is None else scale,
        rows.shape[1],
        *latent.stride(),
        *k_rope.stride(),
        *numbers.stride()[:2],
        *scales.stride()[:2],
        *rope_out.stride()[:2],
        **constants_of(rank, rope, groups, scale is not None),
        num_warps=1,
        enable_fp_fusion=True,
    )


@cache
def constants_of(rank: int, rope: int, groups: int, one_scale: bool) -> dict[str, int | bool]:
    """The constants that the kernel is specialised to."""
    return {
        "GROUPS": groups,
        "GROUP": rank // groups,
        "R": rope,
        "BLOCK": power_of_two(rank // groups),
        "ROPE": power_of_two(max(rope, 1)),
        "ONE_SCALE": one_scale,
    }
