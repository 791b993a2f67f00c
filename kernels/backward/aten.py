"""Gradients of MLA, a group of heads at a time: keys and values are up-projected again, or are the latents themselves.

A group has as many heads as fit, with the keys of all tokens, into a quarter of the forward's workspace (the backward
holds four times as many tensors of that size), and on CPU at least one per thread. Its keys and values are
up-projected, the backward of attention gives their gradients, and these are contracted at once:

    k, v, dk, dv   [H, T, W]      of one group of heads, W the widths of keys and of values or more
    d_latent      += dk[..., :P] @ W_UK + dv @ W_UV;    d_rope += dk[..., P:], summed over heads
    d_w_uk, d_w_uv = dk[..., :P]^T @ latent, dv^T @ latent

Where there is no up-projection, all heads share the latent as keys or values, and the latent's gradient is the sum over
heads. No tensor with both a head and a key axis outlives its group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attended import Attended, Wanted
from ..dense import dense
from ..two_latents import latents_of
from ..visibility import Visibility, reads_values, take
from .flash import by_flash_attention, takes_flash
from .products import by_products
from .rows import Rows

_HEADS = 4
"""The workspace holds the keys of `workspace_tokens` tokens for this many heads, a quarter of the forward's."""


@dataclass
class _Gradients:
    """Gradients of the operands, accumulated in at least float32; None where no gradient is wanted."""

    q: Tensor | None
    latent: Tensor | None
    k_rope: Tensor | None
    w_uk: Tensor | None
    w_uv: Tensor | None
    mask: Tensor | None


def attend_backward(x: Attended) -> list[Tensor]:
    """Compute the wanted gradients, each in the dtype of its operand."""
    batch, query_count, heads, _ = x.q.shape
    want, mask = Wanted(*x.wanted), x.mask
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    operands = x.operands
    totals = _Gradients(
        *(
            torch.zeros(operand.shape, dtype=dtype, device=x.q.device) if asked and operand is not None else None
            for operand, asked in zip(operands, x.wanted, strict=True)
        )
    )
    size = heads_at_a_time(x, x.latent.shape[1])
    for start in range(0, heads, size):
        group = slice(start, start + size)
        w_uk, w_uv = (None if weight is None else weight[group].to(dtype) for weight in (x.w_uk, x.w_uv))
        for b in range(batch):
            # Only this sequence's part decides, so that its gradients are bitwise the same in any batch.
            seen = _own(mask, b, group)
            if seen is not None and seen.dtype == torch.bool and reads_values(seen) and bool(seen.all()):
                seen = None  # e.g. the mask of sequences that might have been packed but are not
            by_flash = takes_flash(x.q, seen, x.lse[b, :, group]) and not want.mask
            visibility = Visibility(seen, x.causal_offset, x.latent.shape[1], x.latent.device)
            # flash attention's backward assumes a last stride of 1 without checking
            own_q, own_do, own_o = (dense(t[b, :, group].transpose(0, 1).to(dtype)) for t in (x.q, x.grad_o, x.o))
            rows = Rows(
                own_q,
                own_do,
                own_o,
                x.lse[b, :, group].transpose(0, 1),
                None if x.grad_lse is None else x.grad_lse[b, :, group].transpose(0, 1).to(dtype),
                visibility,
                visibility.keys(range(query_count)),
                x.scale,
            )
            cache = x.latent[b], _ropes(x.k_rope, b, group)
            _add_group(rows, cache, (w_uk, w_uv), _of(totals, b, group), by_flash)
    found = (totals.q, totals.latent, totals.k_rope, totals.w_uk, totals.w_uv, totals.mask)
    return [
        total.to(operand.dtype)
        for total, operand in zip(found, operands, strict=True)
        if total is not None and operand is not None
    ]


def heads_at_a_time(x: Attended, tokens: int) -> int:
    """The number of heads in a group: as many as fit, with `tokens` keys of each, and at least one per CPU thread."""
    least = torch.get_num_threads() if x.q.is_cpu else 1  # kernels split heads over threads
    return max(_HEADS * x.workspace_tokens // max(tokens, 1), least)


def _of(totals: _Gradients, b: int, group: slice) -> _Gradients:
    """Views of the totals for one sequence and group of heads; that of the queries is `[H, Sq, P + R]`."""
    return _Gradients(
        None if totals.q is None else totals.q[b, :, group].transpose(0, 1),
        None if totals.latent is None else totals.latent[b],
        None if totals.k_rope is None else _ropes(totals.k_rope, b, group),
        None if totals.w_uk is None else totals.w_uk[group],
        None if totals.w_uv is None else totals.w_uv[group],
        _own(totals.mask, b, group),
    )


def _ropes(k_rope: Tensor, b: int, group: slice) -> Tensor:
    """The rope keys of a sequence and a group of heads, or their gradients: `[T, R]` if all heads share them, else
    `[T, H, R]`."""
    return k_rope[b] if k_rope.dim() == 3 else k_rope[b, :, group]


def _own(mask: Tensor | None, b: int, group: slice) -> Tensor | None:
    """The part of a mask, or of its gradient, that belongs to a sequence and a group of heads."""
    if mask is None:
        return None
    own = mask if mask.shape[0] == 1 else mask[b : b + 1]
    return own if own.shape[1] == 1 else own[:, group]


def _add_group(
    rows: Rows,
    cache: tuple[Tensor, Tensor],
    weights: tuple[Tensor | None, Tensor | None],
    totals: _Gradients,
    by_flash: bool,
) -> None:
    """Add the contribution of one group of heads of a sequence to the totals.

    The cache is `[T, L]` and, as `_ropes` gives them, the rope keys.
    """
    (w_uk, w_uv), keys, dtype = weights, rows.keys, rows.q.dtype
    if len(keys) == 0:
        return
    latent, ropes = (take(part, keys, 0).to(dtype) for part in cache)
    shared = ropes.dim() == 2
    ropes = ropes[None] if shared else ropes.transpose(0, 1)
    blanks = rows.visibility.blanks(range(rows.q.shape[1]), keys)
    if blanks is not None:
        latent, ropes = (part.masked_fill(blanks[0][:, None], 0.0) for part in (latent, ropes))
    heads, columns = rows.q.shape[0], rows.o.shape[2]
    nope = rows.q.shape[2] - ropes.shape[2]
    # Flash attention requires keys and values of equal width; a gradient of lse needs one more column.
    width = max(rows.q.shape[2], columns + (rows.d_lse is not None)) if by_flash else None
    of_keys, of_values = latents_of(latent, w_uk, w_uv)
    k = _of_heads(of_keys, w_uk, heads, width or rows.q.shape[2], ropes)
    v = _of_heads(of_values, w_uv, heads, width or columns)
    dq, dk, dv = by_flash_attention(rows, k, v) if by_flash else by_products(rows, k, v, totals.mask)
    del k, v
    dk_nope, dk_rope, dv = dk[..., :nope], dk[..., nope : rows.q.shape[2]], dv[..., :columns]
    if totals.q is not None:
        totals.q += dq[..., : rows.q.shape[2]]
    if totals.latent is not None:
        part = totals.latent.narrow(0, keys.start, len(keys)) if isinstance(keys, range) else torch.zeros_like(latent)
        for grads, weight, own in zip((dk_nope, dv), weights, latents_of(part, *weights), strict=True):
            _contract(grads, weight, own)
        if blanks is not None:
            part.masked_fill_(blanks[0][:, None], 0.0)
        if not isinstance(keys, range):
            totals.latent.index_add_(0, keys, part)
    if totals.k_rope is not None:
        part = dk_rope.sum(0) if shared else dk_rope.transpose(0, 1)
        if isinstance(keys, range):
            totals.k_rope.narrow(0, keys.start, len(keys)).add_(part)
        else:
            totals.k_rope.index_add_(0, keys, part)
    if totals.w_uk is not None:
        totals.w_uk += dk_nope.mT @ of_keys
    if totals.w_uv is not None:
        totals.w_uv += dv.mT @ of_values


def _of_heads(latent: Tensor, weight: Tensor | None, heads: int, width: int, ropes: Tensor | None = None) -> Tensor:
    """`[H, T, width]`: the latent, up-projected if there is a weight, then rope keys `[1 or H, T, R]` if given, padded
    with zeros."""
    alike = weight is None and (ropes is None or ropes.shape[0] == 1)
    whole = latent.new_zeros((1 if alike else heads, latent.shape[0], width))
    columns = latent.shape[1] if weight is None else weight.shape[1]
    if weight is None:
        whole[..., :columns] = latent
    else:
        torch.bmm(latent.expand(heads, -1, -1), weight.mT, out=whole[..., :columns])
    if ropes is not None:
        whole[..., columns : columns + ropes.shape[2]] = ropes
    return whole.expand(heads, -1, -1)


def _contract(grads: Tensor, weight: Tensor | None, total: Tensor) -> None:
    """Add the latent's gradient due to `grads` `[H, T, W]`, those of its up-projections, to `total` `[T, L]`."""
    if weight is None:
        total += grads.sum(0)
        return
    for grad, of_head in zip(grads, weight, strict=True):
        total.addmm_(grad, of_head)
