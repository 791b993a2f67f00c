"""Chunked MLA in C++ (`native.cpp`): the implementation for CPU tensors.

In compiled graphs without a mask, `dispatcher/expanded_attention.h` does the same without this Python code.

The kernel keeps its scores in a core's first-level cache, takes values of their own width (CPU flash attention requires
the keys' width), and stops at the diagonal. Keys are bfloat16 for bfloat16 queries where the CPU multiplies pairs of
them; otherwise they are float32, and half precision is only read and written. For float16, which few CPUs multiply,
that is always so. float64 tensors, and machines without a C++ compiler, take `aten.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..bundles import checked
from ..dispatcher import general
from ..native import ATTEND, NUMBER, PAIRS, PANELS, VECTOR, Kernels, dtype_of_keys
from ..visibility import KeyPositions, Visibility
from .arguments import ExpandedAttention
from .aten import Flash
from .chunks import Arithmetic, Keys, attend_in_chunks, masked_tiles

_HERE = Path(__file__).parent
KERNELS = Kernels(
    (VECTOR, ATTEND, NUMBER, PAIRS, PANELS, _HERE / "call.h", _HERE / "native.cpp"),
    ("const void*",) * 4 + ("uintptr_t",) + ("float*",) * 2 + ("int64_t",) * 22 + ("float", "int64_t"),
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
        if keys.rope.shape[2] > 1 and keys.rope.stride(2) != 1:
            keys = Keys(keys.nope, keys.rope.contiguous(), keys.v)
        offset = len(chunk)
        if visibility.causal_offset is not None and isinstance(chunk, range):  # then the kernel stops at the diagonal
            offset = visibility.causal_offset - chunk.start
            visibility = replace(visibility, causal_offset=None)
        for queries, bias in _tiles(visibility, chunk, range(max(-offset, 0), q.shape[1])):
            rows = slice(queries.start, queries.stop)
            own = state[0][:, rows], state[1][:, rows]
            self._run(q[:, rows], keys, bias, offset + queries.start, scale, own)

    def _run(
        self, q: Tensor, keys: Keys, bias: Tensor | None, offset: int, scale: float, state: tuple[Tensor, Tensor]
    ) -> None:
        """bias `[1, H or 1, s or 1, C]`; query i sees keys up to i + offset."""
        heads, query_count, _ = q.shape
        nope, rope, v = keys.nope, keys.rope.expand(heads, -1, -1), keys.v
        bias_strides = (0, 0, 0) if bias is None else bias.expand(1, heads, query_count, v.shape[1]).stride()[1:]
        self.kernel(
            *(q, nope, rope, v, 0 if bias is None else bias.data_ptr(), *state),
            *(heads, query_count, v.shape[1], nope.shape[2], rope.shape[2], v.shape[2]),
            *(*q.stride()[:2], *nope.stride()[:2], *rope.stride()[:2], v.stride(0), v.stride(2), *bias_strides),
            *(*state[0].stride()[:2], *state[1].stride()),
            *(offset, scale, torch.get_num_threads()),
        )


def _tiles(visibility: Visibility, chunk: KeyPositions, queries: range) -> Iterator[tuple[range, Tensor | None]]:
    """Tiles of queries, each with the mask's bias for it: all together where a mask is none or the same for all."""
    mask = visibility.mask
    if mask is None or (mask.shape[2] == 1 and visibility.causal_offset is None):
        if queries:
            yield queries, visibility.bias(queries, chunk, torch.float32)
        return
    for tile, bias in masked_tiles(visibility, chunk, queries, torch.float32):
        # Those of several queries, to whose scores the kernel adds them at once, side by side.
        yield tile, None if bias is None else bias.mT.contiguous().mT


expanded_attention_cpu = checked(ExpandedAttention, attend_on_cpu)
general("expanded_attention")(expanded_attention_cpu)
