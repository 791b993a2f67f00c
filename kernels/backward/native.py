"""The gradients on CPU: library products, and a C++ kernel (`native.cpp`) for what is between.

There is a product for each sequence, so that its gradients are the same bits in any batch. Keys, values and their
gradients have the dtype of `panels.h`: bfloat16 for bfloat16 queries where the CPU multiplies pairs of them, else
float32. ATen operations take over for float64, for keys or values that are the latent itself, and without a C++
compiler; for sequences of which a finite number hides all keys from some query, between the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..attended import Attended
from ..dense import dense
from ..even import even
from ..head_groups import Group, attend_backward_in_groups
from ..native import AMX, ATTEND, NUMBER, PAIRS, PANELS, TILE_SUMS, VECTOR, Kernels, dtype_of_keys
from ..visibility import Visibility
from .aten import attend_backward, heads_at_a_time
from .flash import carries_scores
from .products import by_products
from .rows import Rows

KERNELS = Kernels(
    (VECTOR, NUMBER, ATTEND, PAIRS, AMX, TILE_SUMS, PANELS, Path(__file__).with_name("native.cpp")),
    (
        *("const void*",) * 5,
        *("const float*",) * 2,
        *("uintptr_t",) * 3,
        *("void*",) * 4,
        *("int64_t",) * 48,
        "float",
        "int64_t",
    ),
)
_QUERIES = 4096
"""Queries at a time: each thread packs those of a head twice, and sums their gradients in float32."""
_SCORES = 1 << 22
"""The most gradients of scores kept until they are summed over the dims that a mask broadcasts: 16 MiB in float32."""


def attend_backward_on_cpu(x: Attended) -> list[Tensor]:
    """The wanted gradients, each in the dtype of its operand."""
    if x.w_uk is None or x.w_uv is None or not x.q.numel():
        return attend_backward(x)
    kernel = KERNELS.of(x.q.dtype)
    if kernel is None:
        return attend_backward(x)
    keys = dtype_of_keys(kernel, x.q.dtype)

    def attend(group: Group, dq: Tensor, _: bool) -> tuple[Tensor, Tensor, Tensor]:
        carried = carries_scores(group.lse, group.mask, group.q.dtype)
        return _attend(kernel, group, dq) if carried else _attend_by_products(group, dq)

    # Contiguous weights: else each group of each sequence would copy them.
    latent, w_uk, w_uv = (t.to(keys).contiguous() for t in (x.latent, x.w_uk, x.w_uv))
    cast = replace(x, latent=latent, k_rope=x.k_rope.to(keys), w_uk=w_uk, w_uv=w_uv)
    return attend_backward_in_groups(cast, attend, _groups)


def _groups(x: Attended, tokens: int) -> Iterator[tuple[slice, slice]]:
    """All heads of as many sequences, or as many heads of each, as `heads_at_a_time` allows; sequences apart where the
    lse of some does not carry the scores."""
    (batch, _, heads, _), size = x.q.shape, heads_at_a_time(x, tokens)
    together = max(size // heads, 1) if carries_scores(x.lse, x.mask, x.q.dtype) else 1
    for b in range(0, batch, together):
        for head in range(0, heads, size):
            yield slice(b, min(b + together, batch)), slice(head, min(head + size, heads))


def _attend(kernel: Callable[..., None], x: Group, dq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fill dq `[b, Sq, H, P + R]`; dk `[b, T, H, P]`, d_rope `[b, T, H, R]` and dv `[b, T, H, V]`."""
    keys = _expanded(x.of_keys, x.w_uk), x.ropes.expand(-1, -1, x.w_uk.shape[0], -1), _expanded(x.of_values, x.w_uv)
    lse = x.lse.masked_fill(x.lse == -torch.inf, torch.inf).contiguous()
    mean = (x.do.to(torch.float32) * x.o).sum(-1).contiguous()
    if x.d_lse is not None:
        mean -= x.d_lse
    mask = x.mask
    if mask is not None and mask.dtype == torch.bool and bool(mask.all()):  # e.g. of sequences that are one
        mask = None
    found = []
    for queries in _tiles(x):
        part = slice(queries.start, queries.stop)
        of_queries = x.q[:, part], x.do[:, part], lse[:, part], mean[:, part], dq[:, part]
        offset = keys[0].shape[1] if x.causal_offset is None else x.causal_offset + queries.start
        masks = [_of_queries(t, queries) for t in (mask, x.d_mask)]
        found.append(_gradients(kernel, of_queries, keys, masks, offset, x.scale))
    dk, d_rope, dv = found[0] if len(found) == 1 else (_summed(grads) for grads in zip(*found, strict=True))
    return dk, d_rope, dv


def _attend_by_products(x: Group, dq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for one sequence, with its weights computed anew."""
    k, v = _expanded(x.of_keys, x.w_uk), _expanded(x.of_values, x.w_uv)
    k = torch.cat([k, x.ropes.expand(-1, -1, k.shape[2], -1)], dim=3)
    q, do, o, k, v = (t[0].transpose(0, 1).float() for t in (x.q, x.do, x.o, k, v))
    tokens, mask = x.of_keys.shape[1], None if x.mask is None else x.mask[..., : x.of_keys.shape[1]]
    d_lse = None if x.d_lse is None else x.d_lse[0].T.float()
    seen = Visibility(mask, x.causal_offset, tokens, q.device)
    rows = Rows(q, do, o, x.lse[0].T, d_lse, seen, range(tokens), x.scale)
    found, dk, dv = by_products(rows, k, v, x.d_mask)
    dq.copy_(found.transpose(0, 1)[None])
    dk, dv = (t.transpose(0, 1)[None].to(x.of_keys.dtype) for t in (dk, dv))
    nope = x.w_uk.shape[1]
    return dk[..., :nope], dk[..., nope:], dv


def _tiles(x: Group) -> Iterator[range]:
    """Queries at a time."""
    batch, queries, heads, _ = x.q.shape
    step = _QUERIES
    if x.d_mask is not None and x.d_mask.shape != (batch, heads, queries, x.ropes.shape[1]):
        step = max(min(_SCORES // (batch * heads * x.ropes.shape[1]), step), 1)
    for start in range(0, queries, step):
        yield range(start, min(start + step, queries))


def _of_queries(mask: Tensor | None, queries: range) -> Tensor | None:
    return mask if mask is None or mask.shape[2] == 1 else mask[:, :, queries.start : queries.stop]


def _gradients(
    kernel: Callable[..., None],
    of_queries: tuple[Tensor, ...],
    keys: tuple[Tensor, ...],
    masks: Sequence[Tensor | None],
    offset: int,
    scale: float,
) -> tuple[Tensor, ...]:
    """Those of the keys, the rope keys and the values due to q, do, lse, mean and dq `[b, s, H, .]`; fills dq, and adds
    to the gradient of the mask, the second of `masks`."""
    q, do, lse, mean, dq = of_queries
    (batch, queries, heads, _), tokens = q.shape, keys[0].shape[1]
    every = batch, heads, queries, tokens
    grads = [keys[0].new_empty(key.shape) for key in keys]
    mask, d_mask = (None if t is None else t[..., :tokens] for t in masks)
    seen = bias = d_bias = None
    if mask is not None and mask.dtype == torch.bool:
        seen = mask.expand(every)
    elif mask is not None:
        bias = dense(mask.to(torch.float32).expand(every))
    if d_mask is not None:
        d_bias = d_mask if d_mask.shape == every else d_mask.new_zeros(every)
    kernel(
        *(q, do, *keys, lse, mean),
        *(0 if t is None else t.data_ptr() for t in (seen, bias, d_bias)),
        *(dq, *grads),
        *(batch, heads, queries, tokens, *(key.shape[3] for key in keys)),
        *(step for t in (q, do, *keys, lse) for step in _strides(t)),
        *(step for t in (seen, bias, d_bias) for step in _strides(None if t is None else t.transpose(1, 2))),
        *(step for t in (dq, *grads) for step in _strides(t)),
        *(0 if seen is None else seen.stride(3), offset, scale, torch.get_num_threads()),
    )
    if d_mask is not None and d_bias is not d_mask:
        assert d_bias is not None
        d_mask += d_bias.sum_to_size(d_mask.shape)
    return tuple(grads)


def _strides(t: Tensor | None) -> tuple[int, int, int]:
    """Those of sequences, heads and rows of `[b, s, H, .]`."""
    return (0, 0, 0) if t is None else (t.stride(0), t.stride(2), t.stride(1))


def _summed(grads: Sequence[Tensor]) -> Tensor:
    """The sum of gradients, rounded once."""
    total = grads[0].float()
    for grad in grads[1:]:
        total += grad
    return total.to(grads[0].dtype)


def _expanded(latent: Tensor, weight: Tensor) -> Tensor:
    """`[b, T, H, W]` of a latent `[b, T, L]` and a weight `[H, W, L]`, one product for each sequence."""
    whole, columns = latent.new_empty((*latent.shape[:2], *weight.shape[:2])), even(weight.flatten(0, 1)).T
    for own, of_own in zip(whole.flatten(2), latent, strict=True):
        torch.mm(even(of_own), columns, out=own)
    return whole
