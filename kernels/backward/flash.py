"""Gradients of one group of heads by the backward of torch's flash attention on CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...score_spacing import lost_in_ops
from ..visibility import causal_stop
from .rows import Rows

_MASKED_QUERIES = 256
"""Queries at a time under a mask, whose bias takes 4 bytes per query and key."""


def takes_flash(q: Tensor, mask: Tensor | None, lse: Tensor) -> bool:
    """Whether CPU flash attention's backward, which relies on the forward's lse, gives what a softmax would."""
    return q.is_cpu and q.dtype != torch.float64 and q.numel() != 0 and carries_scores(lse, mask, q.dtype)


def carries_scores(lse: Tensor, mask: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the lse of each row tells the weights of its scores.

    It does not for rows that a finite mask value hides from every key: their lse is rounded to about that value and no
    longer carries the scores.
    """
    return mask is None or mask.dtype == torch.bool or not bool(((lse <= lost_in_ops(dtype)) & lse.isfinite()).any())


def by_flash_attention(rows: Rows, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv by CPU flash attention's backward, which normalises by `rows.lse` whichever keys it is given.

    It subtracts `sum(do * o)` from the gradients of a row's weights, so a gradient of lse is passed as one more column
    of both.
    """
    width, columns = k.shape[2], rows.o.shape[2]
    q, do, o = (torch.nn.functional.pad(t, (0, width - t.shape[2])) for t in (rows.q, rows.do, rows.o))
    if rows.d_lse is not None:
        o[..., columns] = 1.0
        do[..., columns] = -rows.d_lse
    # A row that sees no key has lse -inf, and -inf - -inf is NaN; with 0 all its weights are 0.
    lse = rows.lse.masked_fill(rows.lse == -torch.inf, 0.0).contiguous()
    totals: tuple[Tensor, ...] | None = None
    for queries, keys, causal, bias in _pieces(rows, q.dtype):
        part, seen = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(t[None, :, part] for t in (do, q)),
            *(t[None, :, seen] for t in (k, v)),
            *(t[None, :, part] for t in (o, lse)),
            0.0,
            causal,
            attn_mask=bias,
            scale=rows.scale,
        )
        grads = tuple(grad[0] for grad in grads)
        if len(queries) == q.shape[1] and len(keys) == k.shape[1] and totals is None:
            totals = grads
            continue
        if totals is None:
            totals = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for total, place, grad in zip(totals, (part, seen, seen), grads, strict=True):
            total[:, place] += grad
    dq, dk, dv = totals or (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
    return dq, dk, dv


def _pieces(rows: Rows, dtype: torch.dtype) -> Iterator[tuple[range, range, bool, Tensor | None]]:
    """Yield queries, positions among the keys, whether the i-th query sees only the first i + 1 of them, and a bias."""
    visibility, every, queries = rows.visibility, range(len(rows.keys)), range(rows.q.shape[1])
    offset = visibility.causal_offset
    if visibility.mask is not None:
        for start in queries[::_MASKED_QUERIES]:
            some = queries[start : start + _MASKED_QUERIES]
            seen = every
            if isinstance(rows.keys, range):
                seen = every[: max(causal_stop(offset, some, visibility.tokens) - rows.keys.start, 0)]
            bias = visibility.bias(some, rows.keys[: len(seen)], dtype)
            if len(seen) and (bias is None or not bool((bias == -torch.inf).all())):
                yield some, seen, False, None if bias is None else bias.contiguous()
        return
    if offset is None:
        yield queries, every, False, None
        return
    if offset > 0 and every[:offset]:
        yield queries, every[:offset], False, None
    if every[max(offset, 0) :] and queries[max(-offset, 0) :]:
        yield queries[max(-offset, 0) :], every[max(offset, 0) :], True, None
