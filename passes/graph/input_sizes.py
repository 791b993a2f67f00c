"""Ask inputs for sizes that a graph asks tensors for which a rewrite leaves without another use.

n = sym_size(weights, 0)    ->    n = sym_size(input, 0)          or weights would be computed for their size alone
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..nodes.arguments import aten


def take_sizes_from_inputs(graph: fx.Graph) -> None:
    """Ask inputs for every size that one of them has."""
    found: dict[Any, tuple[fx.Node, int]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    found.setdefault(size.node.expr, (node, dim))
        elif node.target is aten.sym_size.int and isinstance(value, torch.SymInt) and value.node.expr in found:
            node.args = found[value.node.expr]
