"""Let caches on CPU that are copied as they grow use memory again."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..ops import grow_cache

LEAST_BYTES = 1 << 20
"""The least size at which memory is used again: the C library keeps smaller blocks by itself."""


def use_memory_again(module: fx.GraphModule) -> None:
    """Replace each `cat` of an input and new tokens that the graph returns by `mla::grow_cache`, where it is on CPU.

    These are caches such as transformers' `DynamicCache`. A cache that stays small whatever the symbolic sizes are is
    left alone.
    """
    returned = set(module.graph.output_node().all_input_nodes)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        if node in returned and (operands := _grows(node)) is not None:
            node.target = grow_cache.default
            node.args, node.kwargs = operands, {}
    module.recompile()


def _grows(node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
    """The cache, what is new, and the dimension along which the cache grows; None for any other `cat`."""
    parts, dim = (*node.args, 0)[:2]
    if not isinstance(parts, list | tuple) or len(parts) != 2 or not isinstance(dim, int):
        return None
    past, new = parts
    if not (isinstance(past, fx.Node) and isinstance(new, fx.Node) and past.op == "placeholder"):
        return None
    values = [part.meta["val"] for part in (past, new)]
    whole = node.meta["val"]
    alike = all(isinstance(v, Tensor) and v.is_cpu and (v.dtype, v.dim()) == (whole.dtype, whole.dim()) for v in values)
    small = statically_known_true(whole.numel() * whole.element_size() < LEAST_BYTES)
    return (past, new, dim) if alike and _is_contiguous(whole) and not small else None


def _is_contiguous(tensor: Tensor) -> bool:
    """Whether a tensor of any sizes is contiguous for certain, which adds no guard."""
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not (statically_known_true(size == 1) or statically_known_true(stride == expected)):
            return False
        expected = expected * size
    return True
