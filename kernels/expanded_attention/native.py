"""Chunked MLA in C++ (`native.cpp`); what CPU tensors get.

The kernel keeps its scores in a core's first-level cache, takes V as wide as it is (CPU flash attention wants it as
wide as K), and stops at the diagonal. float64, and a machine without a C++ compiler, go to `aten.py`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..bundles import checked, implement
from ..native import ATTEND, VECTOR, load
from ..visibility import KeyPositions, Visibility
from .arguments import ExpandedAttention
from .aten import attend_by_flash
from .chunks import Attend, attend_in_chunks, masked_tiles

_SOURCES = VECTOR, ATTEND, Path(__file__).with_name("native.cpp")
_ARGUMENTS = ("const float*",) * 4 + ("float*",) * 2 + ("int64_t",) * 20 + ("float", "int64_t")


def attend_on_cpu(x: ExpandedAttention) -> tuple[Tensor, Tensor]:
    """o and lse."""
    return attend_in_chunks(x, fastest(x.q.dtype))


def fastest(dtype: torch.dtype) -> Attend:
    """What attends to chunks of queries of `dtype`: this kernel, or flash attention."""
    native = dtype != torch.float64 and load(_SOURCES, _ARGUMENTS) is not None
    return attend_natively if native else attend_by_flash


def attend_natively(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    chunk: KeyPositions,
    scale: float,
    state: tuple[Tensor, Tensor],
) -> None:
    """`Attend`: the kernel goes on from the state it finds."""
    if visibility.mask is not None:
        for queries, bias in masked_tiles(visibility, chunk, q.shape[1], torch.float32):
            rows = slice(queries.start, queries.stop)
            _run(q[:, rows], k, v, bias, len(chunk), scale, (state[0][:, rows], state[1][:, rows]))
        return
    assert isinstance(chunk, range)
    offset = len(chunk) if visibility.causal_offset is None else visibility.causal_offset - chunk.start
    _run(q, k, v, None, offset, scale, state)


def _run(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, offset: int, scale: float, state: tuple[Tensor, Tensor]
) -> None:
    """q `[H, s, D]`, k `[H, C, D]`, v `[H, C, V]`, bias `[1, H or 1, s or 1, C]`; state `[H, s, V]` and `[H, s]`.

    Query i sees keys up to i + offset.
    """
    kernel = load(_SOURCES, _ARGUMENTS)
    assert kernel is not None
    (heads, query_count, width), keys = q.shape, k.shape[1]
    bias_strides = (0, 0, 0) if bias is None else bias.expand(1, heads, query_count, keys).stride()[1:]
    kernel(
        *(q, k, v, q if bias is None else bias, *state),
        *(heads, query_count, keys, width, v.shape[2]),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *bias_strides),
        *(*state[0].stride()[:2], *state[1].stride()),
        *(offset, int(bias is not None), scale, torch.get_num_threads()),
    )


expanded_attention_cpu = checked(ExpandedAttention, attend_on_cpu)
implement("expanded_attention", "CPU", expanded_attention_cpu)
