"""A loop over chunks of keys that a graph can hold: the sizes of a run decide the number of iterations.

A chunk is read at positions that are a tensor, so that each iteration has the same shapes; positions past the last key
read the last key, and are hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from ..aliases import apart
from .merge_states.aten import share_of_second

Operands = Any
"""Tensors and sizes that the iterations read, in tuples."""
Count = Any
"""An int or, while a graph is traced, a SymInt."""


@dataclass(frozen=True)
class Positions:
    """The positions `[C]` of a chunk's keys."""

    wanted: Tensor
    inside: Tensor
    """The same, with the last key's position in place of those past it."""


def attend_over_chunks(
    attend: Callable[[Positions, Tensor, Operands], tuple[Tensor, Tensor]],
    operands: Operands,
    mask: Tensor | None,
    causal_offset: Count | Tensor | None,
    tokens: Count,
    size: int,
    zeros: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention `[B, N, Sq, V]` and its lse `[B, N, Sq]` over `tokens` keys, in chunks of `size`.

    With lengths `[B]`, each sequence has only that many keys, the causal offset may be one per sequence, `[B]`, and the
    mask may lack keys that no sequence has.

    `attend` gets the positions of a chunk, a bias for its scores, `[B|1, N|1, Sq, C]`, and the operands, and returns
    the attention to that chunk alone. Mask and causal offset are those of `mla_compile.ops`; `zeros` is the initial o.
    """
    queries = zeros.shape[2]
    stop: Count | Tensor = tokens
    if lengths is not None:
        stop = lengths.max()
    elif causal_offset is not None:
        stop = torch.sym_min(tokens, queries + causal_offset)
    if not isinstance(queries, int) or queries == 0:
        # CPU flash attention with no queries crashes the process, and torch assumes that symbolic sizes exceed 1.
        stop = stop * torch.ones(queries, dtype=torch.bool, device=zeros.device).any()
    size = torch.sym_min(size, tokens)
    taken, spec = pytree.tree_flatten((stop, size, tokens, causal_offset, mask, lengths, operands))
    taken = apart(taken)
    # Only tensors and symbols can be passed to the loop; numbers are part of its code.
    variable = [i for i, leaf in enumerate(taken) if isinstance(leaf, Tensor | torch.SymInt)]

    def given(leaves: tuple[Any, ...]) -> Any:
        whole = dict(enumerate(taken)) | dict(zip(variable, leaves, strict=True))
        return pytree.tree_unflatten([whole[i] for i in range(len(taken))], spec)

    def more(start: Tensor, o: Tensor, lse: Tensor, *leaves: Any) -> Tensor:
        return (start < given(leaves)[0]).squeeze(0)

    def turn(start: Tensor, o: Tensor, lse: Tensor, *leaves: Any) -> tuple[Tensor, Tensor, Tensor]:
        _, size, tokens, causal_offset, mask, lengths, operands = given(leaves)
        wanted = start + torch.arange(size, device=start.device)
        positions = Positions(wanted, wanted.clamp(max=tokens - 1))
        if mask is not None and not statically_known_true(mask.shape[3] == 1):
            there = positions.inside if lengths is None else positions.inside.clamp(max=mask.shape[3] - 1)
            mask = mask.index_select(3, there)
        bias = _bias(positions, mask, causal_offset, tokens if lengths is None else lengths, o.shape[2], o.dtype)
        o_here, lse_here = attend(positions, bias, operands)
        share = share_of_second(lse, lse_here).unsqueeze(-1)
        return start + size, torch.lerp(o, o_here, share.to(o.dtype)), torch.logaddexp(lse, lse_here.to(lse.dtype))

    start = torch.zeros(1, dtype=torch.int64, device=zeros.device)
    lse = zeros.new_full(zeros.shape[:3], -torch.inf, dtype=torch.float32)
    leaves = tuple(taken[i] for i in variable)
    _, o, lse = torch.ops.higher_order.while_loop(more, turn, (start, zeros, lse), leaves)
    return o, lse


def _bias(
    positions: Positions,
    mask: Tensor | None,
    causal_offset: Count | Tensor | None,
    tokens: Count | Tensor,
    queries: Count,
    dtype: torch.dtype,
) -> Tensor:
    """The bias of a chunk's scores, `[B|1, N|1, Sq, C]`, contiguous. The mask is the chunk's part."""
    hidden = torch.ge(positions.wanted, _of_sequences(tokens))
    hidden = hidden.expand(*(hidden.shape[:-2] or (1, 1)), queries, -1)
    if causal_offset is not None:
        last = torch.arange(queries, device=hidden.device)[:, None] + _of_sequences(causal_offset)
        hidden = hidden | (positions.wanted > last)
    bias = torch.zeros((), dtype=dtype, device=hidden.device)
    if mask is not None:
        hidden, bias = (hidden | ~mask, bias) if mask.dtype == torch.bool else (hidden, mask.to(dtype))
    return torch.where(hidden, -torch.inf, bias).contiguous()


def _of_sequences(count: Count | Tensor) -> Any:
    """A number for all sequences unchanged; one per sequence, `[B]`, as `[B, 1, 1, 1]`."""
    return count[:, None, None, None] if isinstance(count, Tensor) else count
