"""The backend's computations on vLLM's pages: `[block_size, L + R]`, a latent and its rope key side by side."""

from __future__ import annotations

import torch
from torch import Tensor

import mla_compile.kernels.register  # noqa: F401  registers the kernels of the op
from mla_compile.ops import paged_latent_attention


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


def write(latent: Tensor, k_rope: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Write latent `[tokens, L]` and k_rope `[tokens, R]` to slots `[tokens]`; negative slots are skipped."""
    rows = pages.view(-1, pages.shape[2])
    kept = slots >= 0
    rows[slots[kept]] = torch.cat([latent, k_rope], dim=1)[kept].to(rows.dtype)
