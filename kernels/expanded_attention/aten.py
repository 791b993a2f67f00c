"""Chunked MLA out of ATen operations: the CPU implementation, and any device's that has no kernel of its own.

A sequence and a group of heads at a time, the keys and values of at most `workspace_tokens` tokens are up-projected
into a workspace, every query that sees some of them attends to them, and the result is merged with what it has:

    latent  [C, L]            a view of the cache; a float32 copy of the chunk for half precision
    k, v    [H, C, D]         D is the greater of P + R and V, because CPU flash attention wants one width; 0 beyond
    o, lse  [H, Sq, V], [H, Sq]

With a causal offset alone, chunks are cut so that each is either seen whole by all queries, or starts where some
query's view ends: a triangle for flash attention's own causal flag, and a rectangle under it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import mla_compile.ops  # noqa: F401  defines the op

from ...errors import KernelError
from ..checks import check_alike, check_mask, check_rank, check_shapes
from ..merge_states.aten import share_of_second
from ..scores import causal_mask, softmax_with_lse
from ..visibility import Keys, Visibility, reads_values, split, take

_HEADS = 16
"""Heads at a time. Bounds the workspace of a model of 128 heads; the weights of 16 are a few MB in float32."""
_QUERIES = 1024
"""Queries at a time. CPU flash attention takes its longest query block, 256, from 768 queries on."""
_TRIANGLE = 128
"""A causal square is halved down to this. CPU flash attention computes all 512 keys of a block that it touches."""
_MASKED_QUERIES = 256
"""Queries at a time under a mask: a tile of a mask that hides all of it is skipped, so tiles are to be small."""
_BIAS_ELEMENTS = 1 << 20
"""Most elements of a mask turned into a bias at a time: 4 MiB in float32."""

_SPACING = 8.0
"""Where floats are this far apart, adding a score changes nothing that a softmax could show."""

Piece = tuple[range, range, bool]
"""Queries, the keys that they attend to as positions in the chunk, and whether query i sees only the first i + 1."""


def expanded_attention_aten(
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    mask: Tensor | None,
    causal_offset: int | None,
    scale: float,
    workspace_tokens: int,
) -> tuple[Tensor, Tensor]:
    """`mla::expanded_attention`; see `mla_compile.ops` for shapes, dtypes and errors."""
    _check(q, latent, k_rope, w_uk, w_uv, mask, workspace_tokens)
    batch, query_count, heads, _ = q.shape
    q, mask, level = _leveled(q, mask)
    o = q.new_zeros((batch, query_count, heads, w_uv.shape[1]))
    lse = q.new_empty((batch, query_count, heads), dtype=torch.float32)
    for b in range(batch):
        for start in range(0, heads, _HEADS):
            group = slice(start, start + _HEADS)
            seen = mask
            if seen is not None and seen.shape[0] != 1:
                seen = seen[b : b + 1]
            if seen is not None and seen.shape[1] != 1:
                seen = seen[:, group]
            _attend_sequence(
                q[b, :, group].transpose(0, 1),
                (latent[b], k_rope[b]),
                (w_uk[group], w_uv[group]),
                Visibility(seen, causal_offset, latent.shape[1], latent.device),
                scale,
                workspace_tokens,
                out=(o[b, :, group].transpose(0, 1), lse[b, :, group].transpose(0, 1)),
            )
    return o, lse if level is None else lse.add_(level)


def _leveled(q: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Bring rows that finite numbers hide from every key up to 0: queries, mask, and what the rows' lse lacks now.

    At -1e30 nothing is left of a score, so the queries may be 0, and nothing of how many keys a chunk had in its lse,
    which is what chunks are merged by.
    """
    if mask is None or mask.dtype == torch.bool:
        return q, mask, None
    lowest = -_SPACING / torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
    peak = mask.amax(-1, keepdim=True)
    lost = (peak <= lowest) & peak.isfinite()
    if reads_values(lost) and not lost.any():
        return q, mask, None
    level = peak.masked_fill(~lost, 0.0)
    return q.masked_fill(lost.transpose(1, 2), 0.0), mask - level, level.squeeze(-1).transpose(1, 2)


def _attend_sequence(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    visibility: Visibility,
    scale: float,
    workspace_tokens: int,
    out: tuple[Tensor, Tensor],
) -> None:
    """Fill out, `[H, Sq, V]` (of zeros) and `[H, Sq]`.

    q `[H, Sq, P + R]`, cache `[T, L]` and `[T, R]`, weights `[H, P, L]` and `[H, V, L]`.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    w_uk, w_uv = (w.to(dtype) for w in weights)
    heads, query_count, width = q.shape
    o = out[0] if out[0].dtype == dtype else out[0].new_zeros(out[0].shape, dtype=dtype)
    lse = o.new_full((heads, query_count), -torch.inf)
    keys = visibility.keys(range(query_count))
    shape = heads, min(workspace_tokens, len(keys)), max(width, w_uv.shape[1])
    k_workspace, v_workspace = o.new_zeros(shape), o.new_zeros(shape)
    for chunk in _chunks(visibility, keys, workspace_tokens):
        k, v = k_workspace[:, : len(chunk)], v_workspace[:, : len(chunk)]
        _expand(cache, (w_uk, w_uv), visibility, range(query_count), chunk, out=(k, v))
        for queries, seen, triangle in _pieces(visibility, chunk, query_count):
            bias = None if visibility.mask is None else visibility.bias(queries, chunk, dtype)
            if bias is not None and reads_values(bias) and bool((bias == -torch.inf).all()):
                continue
            rows = slice(queries.start, queries.stop)
            part = slice(seen.start, seen.stop)
            q_rows = k.new_zeros((heads, len(queries), shape[2]))
            q_rows[..., :width] = q[:, rows]
            o_part, lse_part = _attend(q_rows, k[:, part], v[:, part], bias, triangle, scale)
            o[:, rows].lerp_(o_part[..., : w_uv.shape[1]], share_of_second(lse[:, rows], lse_part)[..., None])
            lse[:, rows] = torch.logaddexp(lse[:, rows], lse_part)
    if o is not out[0]:
        out[0].copy_(o)
    out[1].copy_(lse)


def _chunks(visibility: Visibility, keys: Keys, size: int) -> Iterator[Keys]:
    """The keys, at most `size` at a time, cut where a causal limit alone starts to hide some."""
    cut = visibility.causal_offset if visibility.mask is None else None
    cut = 0 if cut is None else max(cut, 0)
    yield from split(keys[:cut], size)
    yield from split(keys[cut:], size)


def _pieces(visibility: Visibility, chunk: Keys, query_count: int) -> Iterator[Piece]:
    """What to compute for a chunk, in tiles of queries."""
    every = range(len(chunk))
    if visibility.mask is not None:
        elements = visibility.mask.shape[1] * len(chunk)
        step = max(min(_MASKED_QUERIES, _BIAS_ELEMENTS // elements), 1)
        yield from ((queries, every, False) for queries in _tiles(range(query_count), step))
        return
    assert isinstance(chunk, range)
    offset = visibility.causal_offset
    if offset is None or chunk.stop - 1 <= offset:
        yield from ((queries, every, False) for queries in _tiles(range(query_count), _QUERIES))
        return
    first = chunk.start - offset
    corner = range(first, min(first + len(chunk), query_count))
    yield from _triangle(corner, every)
    yield from ((queries, every, False) for queries in _tiles(range(corner.stop, query_count), _QUERIES))


def _tiles(queries: range, size: int) -> Iterator[range]:
    for start in range(0, len(queries), size):
        yield queries[start : start + size]


def _triangle(queries: range, keys: range) -> Iterator[Piece]:
    """A causal square, its lower left quarter as a rectangle and the halves on the diagonal again as squares."""
    if len(keys) <= _TRIANGLE:
        yield queries, keys, True
        return
    half = len(keys) // 2
    yield from _triangle(queries[:half], keys[:half])
    if len(queries) > half:
        yield queries[half:], keys[:half], False
        yield from _triangle(queries[half:], keys[half:])


def _expand(
    cache: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    visibility: Visibility,
    queries: range,
    chunk: Keys,
    out: tuple[Tensor, Tensor],
) -> None:
    """Up-project a chunk into k `[H, C, D]` and v `[H, C, D]`."""
    k, v = out
    latent, k_rope = (take(part, chunk, 0).to(k.dtype) for part in cache)
    blanks = visibility.blanks(queries, chunk)
    if blanks is not None:
        latent, k_rope = (part.masked_fill(blanks[0][:, None], 0.0) for part in (latent, k_rope))
    for width, w, columns in ((weights[0].shape[1], weights[0], k), (weights[1].shape[1], weights[1], v)):
        torch.bmm(latent.expand(w.shape[0], -1, -1), w.transpose(1, 2), out=columns[..., :width])
    k[..., weights[0].shape[1] : weights[0].shape[1] + k_rope.shape[1]] = k_rope


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, triangle: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """q `[H, s, D]`, k and v `[H, C, D]`, bias `[1, H or 1, s or 1, C]` or None; o `[H, s, D]`, lse `[H, s]`.

    CPU flash attention takes a last stride of 1 for granted, which q, k and v have.
    """
    if not q.is_cpu:
        return _attend_composed(q, k, v, bias, triangle, scale)
    if bias is not None:
        bias = bias.contiguous()
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None], k[None], v[None], is_causal=triangle, attn_mask=bias, scale=scale
    )
    if bias is not None:
        # Flash attention gives a row with nothing to attend to o = 0, but lse = 0 for -inf.
        lse = lse.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
    return o[0], lse[0]


def _attend_composed(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, triangle: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """As `_attend`, where there is no flash attention that gives lse for widths of any size."""
    causal = causal_mask(q.shape[1], k.shape[1], 0, q.device) if triangle else None
    weights, lse = softmax_with_lse(scale * (q @ k.mT)[None], bias, causal)
    return weights[0] @ v, lse[0]


def _check(
    q: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    mask: Tensor | None,
    workspace_tokens: int,
) -> None:
    op = "expanded_attention"
    check_rank(op, "q", q, "B Sq N P+R")
    check_rank(op, "latent", latent, "B T L")
    check_rank(op, "k_rope", k_rope, "B T R")
    check_rank(op, "w_uk", w_uk, "N P L")
    check_rank(op, "w_uv", w_uv, "N V L")
    batch, query_count, heads, _ = q.shape
    dims = {"B": batch, "Sq": query_count, "N": heads, "T": latent.shape[1], "L": latent.shape[2]}
    dims |= {"P": w_uk.shape[1], "R": k_rope.shape[2], "V": w_uv.shape[1], "P+R": w_uk.shape[1] + k_rope.shape[2]}
    check_shapes(
        op,
        dims,
        q=(q, "B Sq N P+R"),
        latent=(latent, "B T L"),
        k_rope=(k_rope, "B T R"),
        w_uk=(w_uk, "N P L"),
        w_uv=(w_uv, "N V L"),
    )
    check_alike(op, q=q, latent=latent, k_rope=k_rope, w_uk=w_uk, w_uv=w_uv)
    check_mask(op, mask, (batch, heads, query_count, dims["T"]), q.device)
    if workspace_tokens < 1:
        raise KernelError(f"mla::{op}: expected workspace_tokens of at least 1, found {workspace_tokens}")


torch.library.impl("mla::expanded_attention", "CompositeExplicitAutograd")(expanded_attention_aten)
