"""Recognise attention that is one kernel op of a library: the graph has its operands, not what is done with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..nodes.arguments import aten

_OPERANDS = (["q", "k", "v"], ["query", "key", "value"])
"""Names of the first parameters of attention ops, in torch.nn.attention.varlen and flash-attn alike."""
_FUNCTIONALIZED = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)
_OTHERS = (
    aten.scaled_dot_product_attention.default,  # is sealed, unless its flags are not constants
    aten._native_multi_head_attention.default,  # projects its operands itself
)


def is_kernel(node: fx.Node) -> bool:
    """Whether a node is such an op, judging by the parameter names in its schema."""
    op: Any = node.args[0] if node.target in _FUNCTIONALIZED else node.target
    if not isinstance(op, torch._ops.OpOverload) or op in _OTHERS:
        return False
    return [parameter.name for parameter in op._schema.arguments[:3]] in _OPERANDS
