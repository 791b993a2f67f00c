"""Attention that is one op of a library's kernels: the graph has its operands, and not what is done with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..nodes.arguments import aten

_OPERANDS = (["q", "k", "v"], ["query", "key", "value"])
"""What the first parameters of attention are called, in torch.nn.attention.varlen and flash-attn alike."""
_FUNCTIONALIZED = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)
_OTHERS = (
    aten.scaled_dot_product_attention.default,  # is sealed, but where its flags are no constants
    aten._native_multi_head_attention.default,  # projects its operands itself
)


def is_kernel(node: fx.Node) -> bool:
    """Whether a node is such an op, by the names in its schema."""
    op: Any = node.args[0] if node.target in _FUNCTIONALIZED else node.target
    if not isinstance(op, torch._ops.OpOverload) or op in _OTHERS:
        return False
    return [parameter.name for parameter in op._schema.arguments[:3]] in _OPERANDS
