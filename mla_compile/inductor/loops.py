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


def settings_of_loops(graph: fx.Graph) -> dict[str, Any]:
    """The Inductor settings for a graph; empty if it contains no loop."""
    return {"inplace_buffers": False} if any(node.target in _LOOPS for node in graph.nodes) else {}
