"""Absorbed MLA of many queries in C++: to the kernel of expanded attention, latents are keys and values.

All heads share them, so that they are one head, of N rows for each query:

    q     [1, Sq, N, L], [1, Sq, N, R]
    k, v  [1, C, L]          k the latents as they are, v a copy with the keys last

Unlike the matrix products of `aten.py`, this skips keys that a causal limit or a mask hides from a few rows, and
multiplies bfloat16 in pairs where a CPU does that, which takes half the time. In compiled graphs without a mask,
`dispatcher/many_queries.h` does the same without this Python code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dense import dense
from ..expanded_attention.chunks import Keys, leveled
from ..expanded_attention.native import KERNELS, Native
from ..native import dtype_of_keys
from ..visibility import Visibility, split, take
from .arguments import LatentAttention
from .cached import MOST_ROWS

_TOKENS = 4096
"""Keys at a time."""
_GAP = 64
"""Bytes between the rows of values, a cache line: see `expanded_attention/chunks.py`."""
_FEW_TOKENS = 128
"""Keys below which matrix products are faster in float32, by up to a quarter, unless a causal limit hides some."""
_FEWEST_QUERIES = 32
"""Queries of each head from which pairs of bfloat16 are faster than anything else, whatever the number of heads."""
_ROWS_OF_A_THREAD = 32
"""The least number of rows (queries times heads) per thread that keeps all threads busy: a panel."""


def are_many(x: LatentAttention) -> bool:
    """Whether these are queries that `attend_many` takes."""
    (_, query_count, heads, _), tokens, dtype = x.q_latent.shape, x.latent.shape[1], x.q_latent.dtype
    fewest = _FEW_TOKENS if dtype == torch.float32 and x.causal_offset is None else 1
    enough = query_count * heads > max(MOST_ROWS, _ROWS_OF_A_THREAD * torch.get_num_threads())
    if tokens < fewest or not (enough or (dtype == torch.bfloat16 and query_count >= _FEWEST_QUERIES)):
        return False
    kernel = KERNELS.of(dtype)
    return kernel is not None and (enough or dtype_of_keys(kernel, dtype) == dtype)


def attend_many(x: LatentAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    kernel = KERNELS.of(x.q_latent.dtype)
    assert kernel is not None
    arithmetic = Native(kernel, x.q_latent.dtype)
    q_latent, mask, level = leveled(x.q_latent, x.mask)
    q_rope = x.q_rope if level is None else x.q_rope.masked_fill((level != 0)[..., None], 0.0)
    # The kernel leaves rows alone that see no key.
    all_see = mask is None and (x.causal_offset is None or x.causal_offset >= 0)
    o = (torch.empty if all_see else torch.zeros)(q_latent.shape, dtype=q_latent.dtype)
    lse = q_latent.new_full(q_latent.shape[:3], -torch.inf, dtype=torch.float32)
    for b in range(q_latent.shape[0]):
        seen = mask if mask is None or mask.shape[0] == 1 else mask[b : b + 1]
        visibility = Visibility(seen, x.causal_offset, x.latent.shape[1], x.latent.device)
        _attend((q_latent[b], q_rope[b]), (x.latent[b], x.k_rope[b]), visibility, x.scale, arithmetic, (o[b], lse[b]))
    return o, lse if level is None else lse.add_(level)


def _attend(
    q: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    visibility: Visibility,
    scale: float,
    arithmetic: Native,
    out: tuple[Tensor, Tensor],
) -> None:
    """One sequence: q `[Sq, N, L]`, `[Sq, N, R]`; cache `[T, L]`, `[T, R]`; out `[Sq, N, L]`, `[Sq, N]`, -inf."""
    queries = [dense(part)[None] for part in q]
    o, lse = (part.flatten(0, 1)[None] for part in out)
    positions = visibility.keys(range(q[0].shape[0]))
    # Several chunks are summed in float32.
    state = o if len(positions) <= _TOKENS or o.dtype == torch.float32 else torch.zeros(o.shape)
    for keys in split(positions, _TOKENS):
        latent, k_rope = (dense(take(part, keys, 0).to(arithmetic.dtype)) for part in cache)
        of_each = Keys(latent[None], k_rope[None], _columns(latent)[None])
        arithmetic.attend_shared(queries, of_each, visibility, keys, scale, (state, lse))
    if state is not o:
        o.copy_(state)


def _columns(latent: Tensor) -> Tensor:
    """A copy of latents `[C, L]` whose keys lie side by side."""
    tokens, rank = latent.shape
    memory = latent.new_empty(rank, tokens + _GAP // latent.itemsize)[:, :tokens]
    return memory.copy_(latent.T).T
