"""A small problem, on which another project's kernel has to agree with ours before it is trusted.

Signatures say nothing of the base of a logarithm, of where a causal limit ends, or of what lies behind the last key.
The problem has what would tell: an empty sequence, one of as many tokens as queries, some that end within a page, NaN
behind each end. It is computed once for each kind of problem in a process, and waits for the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..paged_latent_attention.arguments import PagedLatentAttention

Attend = Callable[["PagedLatentAttention"], tuple[Tensor, Tensor]]

_LSE = 2.0**-6
"""Sums of float32 are a thousand times nearer; a key too many of the shortest sequences changes it by 0.2."""
_ROUNDINGS = 4
"""Weights, sums and results are rounded to the queries' dtype, by each of the two."""


def disagreement(x: PagedLatentAttention, other: Attend, ours: Attend) -> str | None:
    """What another implementation gives otherwise than ours for problems like `x`; None where they agree."""
    small = _small(x)
    expected, expected_lse = ours(small)
    try:
        o, lse = other(small)
    except Exception as error:  # whatever another project raises
        return f"fails on a small problem: {type(error).__name__}: {error}"
    for name, result, like in (("o", o, expected), ("lse", lse, expected_lse)):
        if (result.shape, result.dtype) != (like.shape, like.dtype):
            return f"gives {name} of {list(result.shape)} {result.dtype}, expected {list(like.shape)} {like.dtype}"
    largest = small.latent_pages.float().nan_to_num(0).abs().max()
    near = _ROUNDINGS * torch.finfo(x.q_latent.dtype).eps * largest
    if not bool(((o.float() - expected.float()).abs() <= near).all()):
        return "gives another o on a small problem than the Triton kernel"
    if not bool(((lse == expected_lse) | ((lse - expected_lse).abs() <= _LSE)).all()):
        return "gives another lse on a small problem than the Triton kernel"
    return None


def _small(x: PagedLatentAttention) -> PagedLatentAttention:
    """Four sequences with the queries, heads, widths, dtypes and page size of `x`."""
    _, queries, heads, rank = x.q_latent.shape
    page_size, rope, device = x.latent_pages.shape[1], x.rope_pages.shape[2], x.q_latent.device
    lengths = [queries, 0, queries + page_size // 2 + 1, queries + 2 * page_size + 3]
    most = -(-max(lengths) // page_size)
    generator = torch.Generator(device).manual_seed(0)  # not the user's

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(x.q_latent.dtype)

    q = normal(len(lengths), queries, heads, rank + rope)
    rows = normal(len(lengths) * most, page_size, rank + rope)
    table = torch.arange(len(rows), device=device).flip(0).view(len(lengths), most)
    for pages, length in zip(table, lengths, strict=True):
        behind = torch.arange(most * page_size, device=device).view(most, page_size) >= length
        rows[pages] = rows[pages].masked_fill(behind[..., None], torch.nan)
    return dataclasses.replace(
        x,
        q_latent=q[..., :rank],
        q_rope=q[..., rank:],
        latent_pages=rows[..., :rank],
        rope_pages=rows[..., rank:],
        block_table=table.to(x.block_table.dtype),
        seq_lens=torch.tensor(lengths, device=device).to(x.seq_lens.dtype),
        scale=(rank + rope) ** -0.5,  # scores of a variance of 1
    )
