"""Gradients of MLA on a GPU: library products up-project and contract, the kernels in `kernel.py` do what is between.

    latent [B, T, L], w_uk [N, P, L], w_uv [N, V, L]
    k, dk; v, dv; d_rope   [B, T, H, P]; [B, T, H, V]; [B, T, H, R]     of one group of heads, in the dtype of q

For a group of heads of some sequences, `k` and `v` are one product each, and so are the latent's gradients due to them,
`dk @ W_UK` and `dv @ W_UV`, which sum over the heads, and the weights', `dk^T @ latent` and `dv^T @ latent`. What is
summed over groups is summed in float32. Nothing here reads a value from the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from .._common.launch import part_of, strides_of, word_of
from .._common.machine import Machine
from .._common.tiles import Tiles, constants_of_heads
from ..share import PROGRAMS, in_even_groups, share_of
from ..two_latents import latents_of
from ..visibility import Visibility, causal_stop
from .attended import Attended, Wanted
from .kernel import add_to_keys, add_to_queries
from .tiles import Pair, choose


@dataclass(frozen=True)
class _Group:
    """A group of heads of some sequences: what the kernels read besides keys and values."""

    q: Tensor
    ropes: Tensor
    mask: Tensor | None
    do: Tensor
    causal_offset: int | None
    scale: float


@dataclass(frozen=True)
class _OfRows:
    """What both kernels need of each row, `[b, H, Sq]` in float32: see `kernel.py`."""

    delta: Tensor
    peak: Tensor
    shift: Tensor


def attend_backward_triton(x: Attended, machine: Machine, tiles: Pair | None = None) -> list[Tensor]:
    """The wanted gradients, each in the dtype of its operand, on a machine."""
    assert x.w_uk is not None
    assert x.w_uv is not None
    want, names = Wanted(*x.wanted), ("q", "latent", "k_rope", "w_uk", "w_uv")
    widths = x.w_uk.shape[1], x.k_rope.shape[-1], x.w_uv.shape[1]
    tiles = tiles or choose(machine, *widths, x.q.itemsize, x.mask is not None)
    totals = {name: _zeros(getattr(x, name)) for name in names[1:] if getattr(want, name)}
    totals["q"] = x.q.new_zeros(x.q.shape)  # the kernels write it, and it needs no sums
    tokens = causal_stop(x.causal_offset, range(x.q.shape[1]), x.latent.shape[1])
    q, do, o = (t if t.stride(3) == 1 else t.contiguous() for t in (x.q, x.grad_o, x.o))
    ropes = x.k_rope if x.k_rope.dim() == 4 else x.k_rope[:, :, None]
    ropes = ropes if ropes.shape[3] < 2 or ropes.stride(3) == 1 else ropes.contiguous()
    seen = replace(x, q=q, grad_o=do, o=o, latent=x.latent[:, :tokens], k_rope=ropes[:, :tokens])
    for part in _groups(x, tokens, machine, tiles):
        _add_group(seen, part, totals, tiles)
    return [totals[name].to(x.q.dtype) for name in names if getattr(want, name)]


def _add_group(x: Attended, part: tuple[slice, slice], totals: dict[str, Tensor], tiles: Pair) -> None:
    """Add what a group of heads of some sequences contributes to the totals.

    Only keys that some query may see are among those of `x`, whose rope keys are `[B, T, 1 or N, R]`.
    """
    assert x.w_uk is not None
    assert x.w_uv is not None
    (some, heads), tokens, mask = part, x.latent.shape[1], part_of(x.mask, *part)
    latent, ropes = x.latent[some], x.k_rope[some] if x.k_rope.shape[2] == 1 else x.k_rope[some, :, heads]
    if mask is not None and mask.dtype == torch.bool:
        # Keys that no query sees may hold anything, and 0 times NaN is NaN.
        visibility = Visibility(mask, x.causal_offset, max(mask.shape[3], tokens), mask.device)
        unseen = visibility.hidden_from_all(mask, range(x.q.shape[1]), range(tokens))
        latent, ropes = latent.masked_fill(unseen[..., None], 0), ropes.masked_fill(unseen[..., None, None], 0)
    weights = x.w_uk[heads].flatten(0, 1), x.w_uv[heads].flatten(0, 1)  # [H P, L], [H V, L]
    latents = [own.flatten(0, 1) for own in latents_of(latent, x.w_uk, x.w_uv)]  # [b T, L]
    shape = *latent.shape[:2], heads.stop - heads.start, -1
    k, v = ((own @ weight.T).view(shape) for own, weight in zip(latents, weights, strict=True))
    group = _Group(x.q[some, :, heads], ropes, mask, x.grad_o[some, :, heads], x.causal_offset, x.scale)
    d_lse = None if x.grad_lse is None else x.grad_lse[some, :, heads]
    results = x.o[some, :, heads], x.lse[some, :, heads], d_lse
    of_rows = _to_queries(group, k, v, results, totals["q"][some, :, heads], tiles.to_queries)
    if totals.keys() == {"q"}:
        return
    dk, d_rope, dv = _to_keys(group, k, v, of_rows, tiles.to_keys)
    grads = dk.flatten(2).flatten(0, 1), dv.flatten(2).flatten(0, 1)  # [b T, H P], [b T, H V]
    if "latent" in totals:
        of_each = latents_of(totals["latent"][some, :tokens], x.w_uk, x.w_uv)
        for total, grad, weight in zip(of_each, grads, weights, strict=True):
            total += (grad @ weight).view(total.shape)
    if "k_rope" in totals:
        total = totals["k_rope"][some, :tokens]
        if total.dim() == 3:
            total += d_rope.sum(2, dtype=torch.float32)
        else:
            total[:, :, heads] += d_rope
    for name, grad, own in zip(("w_uk", "w_uv"), grads, latents, strict=True):
        if name in totals:
            totals[name][heads] += (grad.T @ own).unflatten(0, (heads.stop - heads.start, -1))


def _zeros(operand: Tensor) -> Tensor:
    return torch.zeros(operand.shape, dtype=torch.float32, device=operand.device)


def _groups(x: Attended, tokens: int, machine: Machine, tiles: Pair) -> Iterator[tuple[slice, slice]]:
    """The sequences and heads taken at a time: as many as the forward takes, and enough to keep the device busy."""
    batch, queries, heads, _ = x.q.shape
    if not x.lse.numel() or not tokens:
        return
    share = share_of(batch, heads, tokens, x.workspace_tokens)
    of_a_head = min(triton.cdiv(tokens, tiles.to_keys.keys), triton.cdiv(queries, tiles.to_queries.rows))
    fewest = triton.cdiv(PROGRAMS * machine.processors, share.sequences * of_a_head)
    size = in_even_groups(heads, max(share.heads, fewest))
    for b in range(0, batch, share.sequences):
        for head in range(0, heads, size):
            yield slice(b, min(b + share.sequences, batch)), slice(head, min(head + size, heads))


def _to_queries(
    x: _Group, k: Tensor, v: Tensor, results: tuple[Tensor, Tensor, Tensor | None], dq: Tensor, tiles: Tiles
) -> _OfRows:
    """Fill dq `[b, Sq, H, P + R]`; results are those of the forward, o and lse, and the gradient of lse."""
    batch, queries, heads, _ = x.q.shape
    o, lse, d_lse = results
    of_rows = _OfRows(*(lse.new_empty((batch, heads, queries)) for _ in range(3)))
    add_to_queries[(triton.cdiv(queries, tiles.rows) * heads * batch,)](
        *(x.q, k, x.ropes, v, x.q if x.mask is None else x.mask),
        *(o, x.do, lse, lse if d_lse is None else d_lse, dq),
        *(of_rows.delta, of_rows.peak, of_rows.shift),
        *_numbers(x, k),
        *_strides(x),
        *o.stride()[:3],
        *x.do.stride()[:3],
        *lse.stride(),
        *strides_of(d_lse, 3),
        *dq.stride()[:3],
        D_LSE=d_lse is not None,
        **constants_of((k.shape[3], x.ropes.shape[3], v.shape[3]), x.mask, x.causal_offset is not None, tiles),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        enable_fp_fusion=True,
    )
    return of_rows


def _to_keys(x: _Group, k: Tensor, v: Tensor, of_rows: _OfRows, tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
    """dk `[b, T, H, P]`, d_rope `[b, T, H, R]` and dv `[b, T, H, V]`."""
    batch, tokens, heads, _ = k.shape
    dk, d_rope, dv = (k.new_empty((*k.shape[:3], width)) for width in (k.shape[3], x.ropes.shape[3], v.shape[3]))
    add_to_keys[(triton.cdiv(tokens, tiles.keys) * heads * batch,)](
        *(x.q, k, x.ropes, v, x.q if x.mask is None else x.mask, x.do),
        *(of_rows.delta, of_rows.peak, of_rows.shift),
        *(dk, d_rope, dv),
        *_numbers(x, k),
        *_strides(x),
        *x.do.stride()[:3],
        **constants_of((k.shape[3], x.ropes.shape[3], v.shape[3]), x.mask, x.causal_offset is not None, tiles),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        enable_fp_fusion=True,
    )
    return dk, d_rope, dv


def _numbers(x: _Group, k: Tensor) -> tuple[float, int, int, int, int]:
    return x.scale, x.q.shape[1], x.q.shape[2], k.shape[1], x.causal_offset or 0


def _strides(x: _Group) -> tuple[int, ...]:
    """Those of queries, rope keys and mask."""
    ropes = x.ropes.expand(-1, -1, x.q.shape[2], -1)
    return *x.q.stride()[:3], *ropes.stride()[:3], *strides_of(x.mask, 4)


def constants_of(widths: tuple[int, int, int], mask: Tensor | None, causal: bool, tiles: Tiles) -> dict[str, Any]:
    """The constants that both kernels are specialised to; widths are `P, R, V`."""
    return {"MASK": word_of(mask), "CAUSAL": causal, **constants_of_heads(widths, tiles)}
