"""Caches whose offsets do not fit into 32 bits, of which only a few elements are ever touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mla_compile.fp8 import RowLayout

BEYOND = 2**31
"""The least offset that does not fit into a signed 32-bit number."""

B, SQ, N, L, R, P, V, T = 3, 2, 2, 16, 8, 8, 8, 300

OPS = {
    "latent_attention": (0, 1),
    "sparse_latent_attention": (0, 1),
    "expanded_attention": (0, 1),
    "paged_latent_attention": (0,),
}
CASES = [(op, dim) for op, dims in OPS.items() for dim in dims]
"""Each op with the dim of its cache to spread: sequences or tokens of a dense cache, pages of a paged one."""


def spread(tensor: Tensor, dim: int = 0) -> Tensor:
    """A copy of the same shape, whose last slice along `dim` is at least 2^31 elements behind the first.

    The stride along `dim` itself fits into 32 bits. The memory in between is never written: the system need not provide
    it.
    """
    sizes = tensor.movedim(dim, 0).shape
    inner = sizes[1:].numel()
    stride = max(-(-BEYOND // (sizes[0] - 1)), inner)
    assert sizes[0] > 2
    assert stride < BEYOND
    storage = np.zeros((sizes[0] - 1) * stride + inner, dtype=f"u{tensor.itemsize}")
    within = torch.empty(sizes[1:], device="meta").stride()
    far = torch.from_numpy(storage).view(tensor.dtype).as_strided(sizes, (stride, *within)).movedim(0, dim)
    return far.copy_(tensor)


def attention_case(op: str, dim: int, dtype: torch.dtype, tokens: int = T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of an op, and the same arguments with the cache spread along a dim."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q = make(B, SQ, N, L + R)
    absorbed = q[..., :L], q[..., L:]
    cache = make(5, 16, L + R) if op == "paged_latent_attention" else make(B, tokens, L + R)
    if op == "paged_latent_attention":
        table, lengths = (torch.tensor(t).int() for t in ([[4, 0], [3, 1], [2, 4]], [25, 18, 32]))
        before, after = absorbed, (table, lengths, True, 0.2)
    elif op == "sparse_latent_attention":
        indices = torch.tensor([[[0, tokens - 1, 7], [3, -1, tokens - 2]]]).int().expand(B, -1, -1)
        before, after = absorbed, (indices, None, None, 0.2, False)
    elif op == "expanded_attention":
        before, after = (make(B, SQ, N, P + R),), (make(N, P, L), make(N, V, L), None, tokens - SQ, 0.2, 64)
    else:
        before, after = absorbed, (None, tokens - SQ, 0.2)
    near, far = ((*before, c[..., :L], c[..., L:], *after) for c in (cache, spread(cache, dim)))
    return near, far


def append_case(one_scale: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of `append_latents`, and the same arguments with the pages spread."""
    latent, k_rope = torch.randn(3, L).half(), torch.randn(3, R).half()
    slots = torch.tensor([0, 4 * 16 + 3, 2 * 16]).int()
    width = L + R if one_scale else RowLayout(L, R, latent.dtype).row_bytes
    rows = torch.zeros(5, 16, width, dtype=torch.float8_e4m3fn if one_scale else torch.uint8)
    scale = torch.tensor(0.01) if one_scale else None
    near, far = ((latent, k_rope, slots, r, scale) for r in (rows, spread(rows.view(torch.uint8)).view(rows.dtype)))
    return near, far
