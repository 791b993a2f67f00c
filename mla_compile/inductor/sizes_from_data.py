"""Keep Inductor from asking how sizes that only data know compare, which it cannot answer.

Its lowering of `bmm` on CPU asks whether a row is at least as far from the next as it is long; where the length comes
from data, torch 2.13 cannot say so, and the compilation fails.
"""

from __future__ import annotations

from typing import Any

from torch import SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..ops import per_head_matmul


def bmm_of_sizes_from_data(left: Tensor, right: Tensor) -> Any:
    """A decomposition for `make_fx`: `left [B, S, K] @ right [B, K, M] -> [B, S, M]` as an op that Inductor only calls.

    Returns NotImplemented for other devices, and where all sizes are known before the graph runs.
    """
    sizes = [size for size in (*left.shape, *right.shape) if isinstance(size, SymInt)]
    if not (left.is_cpu and left.is_floating_point() and any(free_unbacked_symbols(size) for size in sizes)):
        return NotImplemented
    return per_head_matmul(left.transpose(0, 1).unsqueeze(0), right).squeeze(0).transpose(0, 1).contiguous()
