"""Chunked MLA in C++ (`native.cpp`): the implementation for CPU tensors.

In compiled graphs without a mask, `dispatcher/expanded_attention.h` does the same without this Python code.

The kernel keeps its scores in a core's first-level cache, takes values of their own width (CPU flash attention requires
the keys' width), and stops at the diagonal. Keys are bfloat16 for bfloat16 queries where the CPU multiplies pairs of
them; otherwise they are float32, and half precision is only read and written. For float16, which few CPUs multiply,
that is always so. float64 tensors, and machines without a C++ compiler, take `aten.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
        if visibility.mask is not None:
            for queries, bias in masked_tiles(visibility, chunk, q.shape[1], torch.float32):
                rows = slice(queries.start, queries.stop)
                self._run(q[:, rows], keys, bias, len(chunk), scale, (state[0][:, rows], state[1][:, rows]))
            return
        assert isinstance(chunk, range)
        offset = len(chunk) if visibility.causal_offset is None else visibility.causal_offset - chunk.start
        self._run(q, keys, None, offset, scale, state)

    def _run(
        self, q: Tensor, keys: Keys, bias: Tensor | None, offset: int, scale: float, state: tuple[Tensor, Tensor]
    ) -> None:
        """bias `[1, H or 1, s or 1, C]`; query i sees keys up to i + offset."""
        heads, query_count, _ = q.shape
        if bias is not None:  # the kernel adds it to the scores of several queries at once
            bias = bias.mT.contiguous().mT
        nope, rope, v = keys.nope, keys.rope.expand(heads, -1, -1), keys.v
        bias_strides = (0, 0, 0) if bias is None else bias.expand(1, heads, query_count, v.shape[1]).stride()[1:]
        self.kernel(
            *(q, nope, rope, v, 0 if bias is None else bias.data_ptr(), *state),
            *(heads, query_count, v.shape[1], nope.shape[2], rope.shape[2], v.shape[2]),
            *(*q.stride()[:2], *nope.stride()[:2], *rope.stride()[:2], v.stride(0), v.stride(2), *bias_strides),
            *(*state[0].stride()[:2], *state[1].stride()),
            *(offset, scale, torch.get_num_threads()),
        )


expanded_attention_cpu = checked(ExpandedAttention, attend_on_cpu)
general("expanded_attention")(expanded_attention_cpu)
