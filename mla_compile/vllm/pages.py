"""The backend's computations on vLLM's pages: `[block_size, L + R]`, a latent and its rope key side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import mla_compile.kernels.register  # noqa: F401  registers the kernels of the ops
from mla_compile.ops import paged_expanded_attention, paged_latent_attention
from mla_compile.options import Options


def attend(
    q: Tensor, pages: Tensor, block_table: Tensor, seq_lens: Tensor, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend by one query per sequence to the keys in its pages.

    Args: q `[B, N, L + R]`, absorbed; pages `[blocks, block_size, L + R]` of its dtype; block_table `[B, max_blocks]`
    and seq_lens `[B]`, integers; rank, L.
    Returns: o `[B, N, L]` of q's dtype, and lse `[B, N]`, natural, float32; 0 and -inf for a sequence without keys.
    """
    o, lse = paged_latent_attention(
        q[:, None, :, :rank],
        q[:, None, :, rank:],
        pages[..., :rank],
        pages[..., rank:],
        block_table.int(),
        seq_lens.int(),
        False,
        scale,
    )
    return o[:, 0], lse[:, 0]


def attend_to_prompts(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    counts: Sequence[int],
    before: Sequence[int],
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Attend by the last tokens of each sequence to those in its pages, themselves included, under the causal mask.

    Args: q `[tokens, N, P + R]`, `counts[b]` tokens for each of B sequences, one behind another, which has `before[b]`
    tokens before them; pages `[blocks, block_size, L + R]`, block_table `[B, max_blocks]`, w_uk `[N, P, L]` and w_uv
    `[N, V, L]`, of q's dtype but for block_table; out `[tokens, N * V]`, which is filled.
    """
    rank, first = w_uk.shape[2], 0
    for sequence, (count, earlier) in enumerate(zip(counts, before, strict=True)):
        o, _ = paged_expanded_attention(
            q[None, first : first + count],
            pages[..., :rank],
            pages[..., rank:],
            block_table[sequence, None].int(),
            torch.tensor([earlier + count], dtype=torch.int32),
            w_uk,
            w_uv,
            True,
            scale,
            Options.workspace_tokens,
        )
        out[first : first + count] = o[0].flatten(1)
        first += count


def write(latent: Tensor, k_rope: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Write latent `[tokens, L]` and k_rope `[tokens, R]` to slots `[tokens]`; negative slots are skipped."""
    rows = pages.view(-1, pages.shape[2])
    kept = slots >= 0
    rows[slots[kept]] = torch.cat([latent, k_rope], dim=1)[kept].to(rows.dtype)
