"""Seal attention: at Dynamo's level F.scaled_dot_product_attention becomes an op that no device decomposes.

What the passes leave unchanged is unsealed when the graph is traced again: to exactly what Inductor would have had.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from . import ops as ops  # defines the op

_DEFAULTS: dict[str, Any] = {
    "query": None,
    "key": None,
    "value": None,
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


def seal(module: fx.GraphModule) -> int:
    """Seal every SDPA call of a Dynamo graph in place; returns how many."""
    count = 0
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is not F.scaled_dot_product_attention:
            continue
        arguments = _DEFAULTS | dict(zip(_DEFAULTS, node.args, strict=False)) | node.kwargs
        if any(isinstance(arguments[name], fx.Node) for name in ("dropout_p", "is_causal", "scale", "enable_gqa")):
            continue  # a symbolic flag or scale: left to Inductor
        node.target = torch.ops.mla.sealed_attention.default
        node.args, node.kwargs = tuple(arguments.values()), {}
        count += 1
    if count:
        module.recompile()
    return count


def unseal(*args: Any) -> torch.Tensor:
    """A sealed attention as the SDPA call that it was."""
    query, key, value, mask, dropout, causal, scale, grouped = args
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)
