"""Let Inductor not take a buffer that a program writes to for a constant.

    n += 1; attend(n)        Before: every call attends to the n of the export. After: to the present one.

`UniformValueConstantFolder` of torch 2.11 to 2.15 puts the value of any one-element attribute of a graph in the place
of the attribute, and so that of a count of tokens that a package keeps.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import fx
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

from ..passes.nodes.arguments import aten


@functools.cache
def read_written_buffers() -> None:
    """Read such buffers at each call, from now on in this process."""
    deduce: Any = UniformValueConstantFolder._deduce_value

    @functools.wraps(deduce)
    def deduce_constant(self: UniformValueConstantFolder, node: fx.Node) -> Any:
        return self.unknown_value if node.op == "get_attr" and _is_written(node) else deduce(self, node)

    # Inductor has no setting for this alone, nor a hook.
    UniformValueConstantFolder._deduce_value = deduce_constant  # type: ignore[method-assign]


def _is_written(node: fx.Node) -> bool:
    """Whether the graph writes to an attribute: at its end, as it has been made functional before."""
    writes = node.graph.find_nodes(op="call_function", target=aten.copy_.default)
    return any(isinstance(to := write.args[0], fx.Node) and to.target == node.target for write in writes)
