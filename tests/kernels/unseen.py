"""Problems of each attention op in which no query sees some of the cached rows, so that these may hold anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .naive import Inputs, make_inputs, masks
from .paged import make_paged, make_paged_heads


@dataclass(frozen=True)
class Problem:
    """The arguments of `torch.ops.mla.<op>`."""

    op: str
    arguments: tuple[Any, ...]
    more: dict[str, Any] = field(default_factory=dict)


Make = Callable[[torch.dtype, float], Problem]
"""A function that makes a problem in a dtype, with a given number in each row that no query sees."""

HIDING = ("none", "causal", "causal, last keys unseen", "right padding", "left padding and causal", "window")
HIDING += ("scattered keys", "some rows hidden", "one value for all keys", "all hidden", "bias and causal")


def rows(sizes: tuple[int, ...], mask: str, dtype: torch.dtype, fill: float) -> tuple[Inputs, tuple[Any, Any]]:
    """Inputs and a case of `naive`, with `fill` in the keys that no query of their sequence sees."""
    batch, queries, keys, heads = sizes[:4]
    x = make_inputs(sizes, dtype)
    tensor, causal_offset = masks(batch, heads, queries, keys)[mask]
    seen = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    if tensor is not None and tensor.dtype == torch.bool:
        seen = seen & tensor
    elif tensor is not None:
        tensor = tensor.to(dtype)
    if causal_offset is not None:
        seen = seen.tril(causal_offset)
    unseen = ~seen.any(2).any(1)
    x.latent[unseen] = fill
    x.k_rope[unseen] = fill
    return x, (tensor, causal_offset)


def latent_attention(sizes: tuple[int, ...], mask: str) -> Make:
    def make(dtype: torch.dtype, fill: float) -> Problem:
        x, case = rows(sizes, mask, dtype, fill)
        return Problem("latent_attention", (*x.absorbed, *case, x.scale))

    return make


def expanded_attention(sizes: tuple[int, ...], mask: str, workspace_tokens: int) -> Make:
    def make(dtype: torch.dtype, fill: float) -> Problem:
        x, case = rows(sizes, mask, dtype, fill)
        tensors = x.q, x.latent, x.k_rope, x.w_uk, x.w_uv
        return Problem("expanded_attention", (*tensors, *case, x.scale, workspace_tokens))

    return make


def sparse_latent_attention(sizes: tuple[int, ...], mask: str) -> Make:
    """Queries name keys among the first two thirds, and one query names none."""

    def make(dtype: torch.dtype, fill: float) -> Problem:
        x, case = rows(sizes, mask, dtype, fill)
        batch, queries, keys = sizes[:3]
        nameable = 2 * keys // 3
        indices = torch.rand(batch, queries, nameable).topk(nameable // 2).indices
        indices[:, :, ::5] = -1
        indices[0, 0] = keys
        x.latent[:, nameable:] = fill
        x.k_rope[:, nameable:] = fill
        return Problem("sparse_latent_attention", (*x.absorbed, indices, *case, x.scale, False))

    return make


def paged_latent_attention(
    lengths: list[int], sizes: tuple[int, int, int, int], page_size: int, first: list[int] | None = None
) -> Make:
    def make(dtype: torch.dtype, fill: float) -> Problem:
        x = make_paged(lengths, sizes, page_size, dtype)
        starts = None if first is None else torch.tensor(first)
        if starts is not None:
            _hide(x.pool, x.block_table, lengths, [start + sizes[0] for start in first])
        x.pool[x.pool.isnan()] = fill
        return Problem("paged_latent_attention", (*x.arguments, True, x.scale), {"first_positions": starts})

    return make


def paged_expanded_attention(
    lengths: list[int],
    sizes: tuple[int, int, int, int, int, int],
    page_size: int,
    workspace_tokens: int,
    first: list[int] | None = None,
    counts: list[int] | None = None,
    causal: bool = True,
    masked: bool = False,
) -> Make:
    def make(dtype: torch.dtype, fill: float) -> Problem:
        x = make_paged_heads(lengths, sizes, page_size, dtype)
        latent, rope, table, _ = x.cache
        starts = None if first is None else torch.tensor(first)
        given = None if counts is None else torch.tensor(counts)
        if first is not None and causal:
            stops = [start + count for start, count in zip(first, counts or [sizes[0]] * len(first), strict=True)]
            _hide(latent, table, lengths, stops)
            _hide(rope, table, lengths, stops)
        mask = None
        if masked:
            mask = torch.rand(len(lengths), 1, sizes[0], max(lengths)) < 0.3
            for b, length in enumerate(lengths):
                seen = mask[b, 0, :, :length]
                if causal:
                    start = first[b] if first else length - (counts[b] if counts else sizes[0])
                    seen = seen.tril(start)
                hidden = (~seen[: counts[b] if counts else sizes[0]].any(0)).nonzero().flatten()
                for pages in (latent, rope):
                    pages[table[b, hidden // page_size].long(), hidden % page_size] = torch.nan
        for pages in (latent, rope):
            pages[pages.isnan()] = fill
        if counts is not None:
            x.q[torch.arange(sizes[0]) >= given[:, None]] = fill
        more = {"first_positions": starts, "query_lens": given, "mask": mask}
        return Problem("paged_expanded_attention", (*x.arguments, causal, x.scale, workspace_tokens), more)

    return make


def _hide(pages: Tensor, table: Tensor, lengths: list[int], stops: list[int]) -> None:
    """Write NaN over the tokens of each sequence from its stop on."""
    for b, (length, stop) in enumerate(zip(lengths, stops, strict=True)):
        unseen = torch.arange(length)[max(stop, 0) :]
        pages[table[b, unseen // pages.shape[1]].long(), unseen % pages.shape[1]] = torch.nan


# B, Sq, T, N, L, P, R, V: ranks and widths are odd, the hard case for products that take numbers two at a time.
ROWS = (2, 5, 40, 3, 11, 7, 5, 9)
MANY_ROWS = (2, 90, 100, 3, 11, 7, 5, 9)

MAKE: dict[str, Make] = {
    **{f"latent, {mask}": latent_attention(ROWS, mask) for mask in HIDING},
    "latent, many rows": latent_attention(MANY_ROWS, "left padding and causal"),
    **{f"expanded, {mask}": expanded_attention(ROWS, mask, 16) for mask in HIDING},
    "expanded, one chunk": expanded_attention(ROWS, "left padding and causal", 64),
    "expanded, many queries": expanded_attention(MANY_ROWS, "causal, last keys unseen", 33),
    **{f"sparse, {mask}": sparse_latent_attention(ROWS, mask) for mask in ("none", "right padding", "causal")},
    "paged": paged_latent_attention([37, 0, 16, 3], (3, 2, 11, 5), 8),
    "paged, queries that are not the last": paged_latent_attention([37, 9, 16], (3, 2, 11, 5), 8, [3, 20, -2]),
    "paged expanded": paged_expanded_attention([20, 5], (5, 3, 11, 7, 5, 9), 8, 64),
    "paged expanded, no rope": paged_expanded_attention([20, 5], (5, 3, 11, 7, 0, 9), 8, 64),
    "paged expanded, chunks": paged_expanded_attention([37, 40, 3, 0], (9, 2, 11, 7, 5, 9), 16, 12),
    "paged expanded, queries that are not the last": paged_expanded_attention(
        [37, 40, 3], (9, 2, 11, 7, 5, 9), 16, 20, [5, 30, -4]
    ),
    "paged expanded, as many queries as a sequence has": paged_expanded_attention(
        [37, 40, 3], (9, 2, 11, 7, 5, 9), 16, 20, [5, 30, 0], [9, 2, 0]
    ),
    "paged expanded, no causal limit": paged_expanded_attention(
        [37, 40, 3], (9, 2, 11, 7, 5, 9), 16, 20, causal=False, masked=True
    ),
    "paged expanded, a mask": paged_expanded_attention([37, 40, 3], (9, 2, 11, 7, 5, 9), 16, 20, masked=True),
    "paged expanded, a mask and padding": paged_expanded_attention(
        [37, 40, 3], (9, 2, 11, 7, 5, 9), 16, 20, counts=[9, 2, 0], masked=True
    ),
}
