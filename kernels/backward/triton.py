"""Gradients of MLA by two Triton kernels, between the library products of `head_groups.py`.

    k, dk; v, dv; d_rope   [b, T, H, P]; [b, T, H, V]; [b, T, H, R]     of one group of heads, in the dtype of q

`k` and `v` are one product each. Nothing here reads a value from the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from .._common.launch import strides_of, word_of
from .._common.machine import Machine
from .._common.tiles import Tiles, constants_of_heads
from ..attended import Attended
from ..head_groups import Group, attend_backward_in_groups, busy_groups
from ..share import PROGRAMS
from .kernel import add_to_keys, add_to_queries
from .tiles import Pair, choose


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
    widths, queries = (x.w_uk.shape[1], x.k_rope.shape[-1], x.w_uv.shape[1]), x.q.shape[1]
    pair = tiles or choose(machine, *widths, x.q.itemsize, x.mask is not None)

    def attend(group: Group, dq: Tensor, keys_too: bool) -> tuple[Tensor, Tensor, Tensor] | None:
        k, v = _expanded(group.of_keys, group.w_uk), _expanded(group.of_values, group.w_uv)
        of_rows = _to_queries(group, k, v, dq, pair.to_queries)
        return _to_keys(group, k, v, of_rows, pair.to_keys) if keys_too else None

    def fewest(sequences: int, tokens: int) -> int:
        of_a_head = min(triton.cdiv(tokens, pair.to_keys.keys), triton.cdiv(queries, pair.to_queries.rows))
        return triton.cdiv(PROGRAMS * machine.processors, sequences * of_a_head)

    return attend_backward_in_groups(x, attend, busy_groups(fewest))


def _expanded(latent: Tensor, weight: Tensor) -> Tensor:
    """`[b, T, H, W]`, contiguous, of a latent `[b, T, L]` and a weight `[H, W, L]`."""
    return (latent.flatten(0, 1) @ weight.flatten(0, 1).T).view(*latent.shape[:2], *weight.shape[:2])


def _to_queries(x: Group, k: Tensor, v: Tensor, dq: Tensor, tiles: Tiles) -> _OfRows:
    """Fill dq `[b, Sq, H, P + R]`."""
    batch, queries, heads, _ = x.q.shape
    of_rows = _OfRows(*(x.lse.new_empty((batch, heads, queries)) for _ in range(3)))
    add_to_queries[(triton.cdiv(queries, tiles.rows) * heads * batch,)](
        *(x.q, k, x.ropes, v, x.q if x.mask is None else x.mask),
        *(x.o, x.do, x.lse, x.lse if x.d_lse is None else x.d_lse, dq),
        *(of_rows.delta, of_rows.peak, of_rows.shift),
        *_numbers(x, k),
        *_strides(x),
        *x.o.stride()[:3],
        *x.do.stride()[:3],
        *x.lse.stride(),
        *strides_of(x.d_lse, 3),
        *dq.stride()[:3],
        D_LSE=x.d_lse is not None,
        **constants_of((k.shape[3], x.ropes.shape[3], v.shape[3]), x.mask, x.causal_offset is not None, tiles),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        enable_fp_fusion=True,
    )
    return of_rows


def _to_keys(x: Group, k: Tensor, v: Tensor, of_rows: _OfRows, tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
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


def _numbers(x: Group, k: Tensor) -> tuple[float, int, int, int, int]:
    return x.scale, x.q.shape[1], x.q.shape[2], k.shape[1], x.causal_offset or 0


def _strides(x: Group) -> tuple[int, ...]:
    """Those of queries, rope keys and mask."""
    ropes = x.ropes.expand(-1, -1, x.q.shape[2], -1)
    return *x.q.stride()[:3], *ropes.stride()[:3], *strides_of(x.mask, 4)


def constants_of(widths: tuple[int, int, int], mask: Tensor | None, causal: bool, tiles: Tiles) -> dict[str, Any]:
    """The constants that both kernels are specialised to; widths are `P, R, V`."""
    return {"MASK": word_of(mask), "CAUSAL": causal, **constants_of_heads(widths, tiles)}
