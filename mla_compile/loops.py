"""How Inductor is to compile graphs that hold loops.

Inductor lets the body of a `while_loop` write to the tensors that it carries, and gives the memory that these had
before the loop to later tensors while the results, which are now there, are still read (torch 2.13). Where nothing is
written in place, results have memory of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .passes.code.differentiable import OVER_GROUPS

_LOOPS = (OVER_GROUPS, torch.ops.higher_order.while_loop)


def settings_of_loops(graph: fx.Graph) -> dict[str, Any]:
    """Settings of Inductor's for a graph: none if it holds no loop."""
    return {"inplace_buffers": False} if any(node.target in _LOOPS for node in graph.nodes) else {}
