"""Chunked MLA in C++ (`native.cpp`): the implementation for CPU tensors.

In compiled graphs without a mask, `dispatcher/expanded_attention.h` does the same without this Python code.

The kernel keeps its scores in a core's first-level cache, takes values of their own width (CPU flash attention requires
the keys' width), and stops at the diagonal. Keys are bfloat16 for bfloat16 queries where the CPU multiplies pairs of
them; otherwise they are float32, and half precision is only read and written. For float16, which few CPUs multiply,
that is always so. float64 tensors, and machines without a C++ compiler, take `aten.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..bundles import checked
from ..dense import dense
from ..dispatcher import general
from ..native import AMX, ATTEND, NUMBER, PAIRS, PANELS, TILE_SUMS, VECTOR, Kernels, dtype_of_keys
from ..visibility import KeyPositions, Visibility
from .arguments import ExpandedAttention
from .aten import Flash
from .chunks import Arithmetic, Keys, attend_in_chunks, masked_tiles

_HERE = Path(__file__).parent
KERNELS = Kernels(
    (VECTOR, NUMBER, ATTEND, PAIRS, AMX, TILE_SUMS, PANELS, _HERE / "call.h", _HERE / "native.cpp"),
    ("const void*",) * 5 + ("uintptr_t", "void*", "float*") + ("int64_t",) * 28 + ("float", "int64_t"),
)


def attend_on_cpu(x: ExpandedAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    return attend_in_chunks(x, fastest(x.q.dtype))


def fastest(dtype: torch.dtype) -> Arithmetic:
    """The arithmetic for queries of `dtype`: this kernel, or flash attention where there is none."""
    kernel = KERNELS.of(dtype)
    return Flash.of(dtype) if kernel is None else Native(kernel, dtype)


@dataclass(frozen=True)
class Native:
    """`Arithmetic` by the kernel for queries of a dtype, which continues from the given state."""

    kernel: Callable[..., None]
    queries: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of_keys(self.kernel, self.queries)

    def attend(
        self,
        q: Tensor,
        keys: Keys,
        visibility: Visibility,
        chunk: KeyPositions,
        scale: float,
        state: tuple[Tensor, Tensor],
    ) -> None:
        """See `Arithmetic`."""
        parts = q[:, :, None].split([keys.nope.shape[2], keys.rope.shape[2]], dim=3)
        self.attend_shared(parts, keys, visibility, chunk, scale, state)

    def attend_shared(
        self,
        q: Sequence[Tensor],
        keys: Keys,
        visibility: Visibility,
        chunk: KeyPositions,
        scale: float,
        state: tuple[Tensor, Tensor],
    ) -> None:
        """The same where S heads share their keys and values: they are one head, with S rows for each query.

        q is `[H, Sq, S, P]` and `[H, Sq, S, R]`; state `[H, Sq * S, V]` and `[H, Sq * S]`. o may have the dtype of the
        queries if this is the only chunk and each lse still -inf.
        """
        query_count, sharers = q[0].shape[1:3]
        if keys.rope.shape[2] > 1 and keys.rope.stride(2) != 1:
            keys = Keys(keys.nope, keys.rope.contiguous(), keys.v)
        offset = len(chunk)
        if visibility.causal_offset is not None and isinstance(chunk, range):  # then the kernel stops at the diagonal
            offset = visibility.causal_offset - chunk.start
            visibility = replace(visibility, causal_offset=None)
        for queries, bias in _tiles(visibility, chunk, range(max(-offset, 0), query_count)):
            rows = slice(queries.start * sharers, queries.stop * sharers)
            own = state[0][:, rows], state[1][:, rows]
            some = [part[:, queries.start : queries.stop] for part in q]
            self._run(some, keys, bias, offset + queries.start, scale, own)

    def _run(
        self,
        q: Sequence[Tensor],
        keys: Keys,
        bias: Tensor | None,
        offset: int,
        scale: float,
        state: tuple[Tensor, Tensor],
    ) -> None:
        """bias `[1, H * S or 1, s or 1, C]`; query i sees keys up to i + offset."""
        (heads, query_count, sharers, _), (o, lse) = q[0].shape, state
        nope, rope, v = keys.nope, keys.rope.expand(heads, -1, -1), keys.v
        by_head = by_query = 0
        if bias is not None:
            bias = dense(bias)
            by_head, by_query = bias.expand(1, heads * sharers, query_count, v.shape[1]).stride()[1:3]
        whole = o.dtype != torch.float32
        self.kernel(
            *(q[0], q[1], nope, rope, v, 0 if bias is None else bias.data_ptr(), o, lse),
            *(heads, query_count * sharers, sharers, v.shape[1], nope.shape[2], rope.shape[2], v.shape[2]),
            *(*q[0].stride()[:3], *q[1].stride()[:3], *nope.stride()[:2], *rope.stride()[:2], v.stride(0), v.stride(2)),
            *(sharers * by_head, by_query, by_head, *o.stride()[:2], *lse.stride()),
            *(offset, whole, scale, torch.get_num_threads()),
        )


def _tiles(visibility: Visibility, chunk: KeyPositions, queries: range) -> Iterator[tuple[range, Tensor | None]]:
    """Tiles of queries, each with the mask's bias for it: all together where nothing is written out for each query."""
    mask = visibility.mask
    in_place = mask is None or mask.shape[2] == 1 or mask.dtype == torch.float32
    if in_place and (mask is None or visibility.causal_offset is None):
        if queries:
            yield queries, visibility.bias(queries, chunk, torch.float32)
        return
    yield from masked_tiles(visibility, chunk, queries, torch.float32)


expanded_attention_cpu = checked(ExpandedAttention, attend_on_cpu)
general("expanded_attention")(expanded_attention_cpu)
