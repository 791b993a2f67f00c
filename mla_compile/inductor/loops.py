"""Inductor settings for graphs that contain loops.

Inductor lets the body of a `while_loop` write to the tensors that it carries. In torch 2.13 it then reuses the memory
of the carried inputs for later tensors, although the loop's results are in that memory and are still read. Without
in-place buffers, results have memory of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..passes.code.differentiable import OVER_GROUPS

_LOOPS = (OVER_GROUPS, torch.ops.higher_order.while_loop)


def settings_of_loops(module: fx.GraphModule) -> dict[str, Any]:
    """The Inductor settings for a graph; empty if neither it nor a part of it, as a checkpoint or a branch, contains a
    loop."""
    graphs = (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))
    found = any(node.target in _LOOPS for graph in graphs for node in graph.nodes)
    return {"inplace_buffers": False} if found else {}
