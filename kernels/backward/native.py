"""The gradients on CPU: library products, and a C++ kernel (`native.cpp`) for what is between.

There is a product for each sequence, so that its gradients are the same bits in any batch. Keys, values and their
gradients have the dtype of `panels.h`: bfloat16 for bfloat16 queries where the CPU multiplies pairs of them, else
float32. ATen operations take over for float64, for masks of numbers, for keys or values that are the latent itself, and
without a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..attended import Attended
from ..even import even
from ..head_groups import Group, attend_backward_in_groups
from ..native import ATTEND, NUMBER, PAIRS, PANELS, VECTOR, Kernels, dtype_of_keys
from .aten import attend_backward, heads_at_a_time

KERNELS = Kernels(
    (VECTOR, ATTEND, NUMBER, PAIRS, PANELS, Path(__file__).with_name("native.cpp")),
    (
        *("const void*",) * 5,
        *("const float*",) * 2,
        "uintptr_t",
        *("void*",) * 4,
        *("int64_t",) * 42,
        "float",
        "int64_t",
    ),
)
_QUERIES = 4096
"""Queries at a time: each thread packs those of a head twice, and sums their gradients in float32."""


def attend_backward_on_cpu(x: Attended) -> list[Tensor]:
    """The wanted gradients, each in the dtype of its operand."""
    of_numbers = x.mask is not None and x.mask.dtype != torch.bool
    if x.w_uk is None or x.w_uv is None or of_numbers or not x.q.numel():
        return attend_backward(x)
    kernel = KERNELS.of(x.q.dtype)
    if kernel is None:
        return attend_backward(x)
    keys = dtype_of_keys(kernel, x.q.dtype)

    def attend(group: Group, dq: Tensor, _: bool) -> tuple[Tensor, Tensor, Tensor]:
        return _attend(kernel, group, dq)

    # Contiguous weights: else each group of each sequence would copy them.
    latent, w_uk, w_uv = (t.to(keys).contiguous() for t in (x.latent, x.w_uk, x.w_uv))
    cast = replace(x, latent=latent, k_rope=x.k_rope.to(keys), w_uk=w_uk, w_uv=w_uv)
    return attend_backward_in_groups(cast, attend, _groups)


def _groups(x: Attended, tokens: int) -> Iterator[tuple[slice, slice]]:
    """All heads of as many sequences, or as many heads of each, as `heads_at_a_time` allows."""
    (batch, _, heads, _), size = x.q.shape, heads_at_a_time(x, tokens)
    together = max(size // heads, 1)
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
    if mask is not None and bool(mask.all()):  # for example that of sequences that might have been packed
        mask = None
    found = []
    for start in range(0, x.q.shape[1], _QUERIES):
        part = slice(start, start + _QUERIES)
        of_queries = x.q[:, part], x.do[:, part], lse[:, part], mean[:, part], dq[:, part]
        offset = keys[0].shape[1] if x.causal_offset is None else x.causal_offset + start
        seen = mask if mask is None or mask.shape[2] == 1 else mask[:, :, part]
        found.append(_gradients(kernel, of_queries, keys, seen, offset, x.scale))
    dk, d_rope, dv = found[0] if len(found) == 1 else (_summed(grads) for grads in zip(*found, strict=True))
    return dk, d_rope, dv


def _gradients(
    kernel: Callable[..., None],
    of_queries: tuple[Tensor, ...],
    keys: tuple[Tensor, ...],
    mask: Tensor | None,
    offset: int,
    scale: float,
) -> tuple[Tensor, ...]:
    """Those of the keys, the rope keys and the values due to q, do, lse, mean and dq `[b, s, H, .]`; fills dq."""
    q, do, lse, mean, dq = of_queries
    (batch, queries, heads, _), tokens = q.shape, keys[0].shape[1]
    grads = [keys[0].new_empty(key.shape) for key in keys]
    if mask is not None:
        mask = mask.expand(batch, heads, queries, -1).transpose(1, 2)
        mask = mask[..., :tokens] if mask.shape[3] != 1 else mask.expand(-1, -1, -1, tokens)
    kernel(
        *(q, do, *keys, lse, mean, 0 if mask is None else mask.data_ptr(), dq, *grads),
        *(batch, heads, queries, tokens, *(key.shape[3] for key in keys)),
        *(step for t in (q, do, *keys, lse, mask, dq, *grads) for step in _strides(t)),
        *(0 if mask is None else mask.stride(3), offset, scale, torch.get_num_threads()),
    )
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
