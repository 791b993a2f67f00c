"""Keep the strides of rewritten outputs where something would see that they changed.

Before   o = latent_attention(...);  return o                           strides as the new code happens to make them
After    o = latent_attention(...);  return o.permute(..).contiguous().permute(..)      strides as they were before

Most models transpose and reshape the output at once, which makes a copy before as after: then nothing is added. What
sees strides: what the graph returns, `as_strided` and the like, and code that torch does not know, such as a user's
kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, statically_known_true

from ..algebra.sizes import Size, same
from ..code.splicing import emit
from ..nodes.arguments import aten
from ..nodes.guards import GuardNeeded
from ..nodes.memory_order import inverse, order_of
from ..nodes.shapes import size_of

_READERS = {
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
    aten.sym_storage_offset.default,
    aten.sym_stride.default,
    aten.sym_stride.int,
    aten.view.dtype,
    aten.view_as_complex.default,
}
"""ATen's ops that read strides, or accept only some."""
_KNOWN = {"_operator", "aten", "mla", "prims"}
"""Where functions come from that compute the same whatever the strides of their operands."""
_OF_NEW_MEMORY = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def keep_strides(graph: fx.Graph, replaced: Mapping[fx.Node, fx.Node]) -> None:
    """Give the new nodes of `replaced`, old nodes with new ones, their old strides where the change would be seen."""
    changed = {new: old for old, new in replaced.items() if new.users and not _alike(old.meta["val"], new.meta["val"])}
    for new in _seen(graph, set(changed)):
        before = set(graph.nodes)
        with graph.inserting_before(new.next):
            laid_out = emit(graph, _in_order(order_of(changed[new].meta["val"])), [new], new)
        new.replace_all_uses_with(laid_out, before.__contains__)


def _seen(graph: fx.Graph, changed: set[fx.Node]) -> set[fx.Node]:
    """Those of the nodes with `changed` strides behind which something reads strides that change with them."""
    seen: set[fx.Node] = set()
    behind: dict[fx.Node, set[fx.Node]] = {}
    """Each node with new strides, with those of `changed` that they come from."""
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes if changed else ():
        if node in changed:
            behind[node], values[node] = {node}, node.meta["val"]
            continue
        origins = set[fx.Node]().union(*(behind.get(operand, ()) for operand in node.all_input_nodes))
        if not origins:
            continue
        if _reads_strides(node):
            seen |= origins
            continue
        if isinstance(node.target, torch._ops.OpOverload) and (
            node.target._schema.is_mutable or _OF_NEW_MEMORY & set(node.target.tags)
        ):
            continue
        try:
            value = _run(node, values)
        except (GuardNeeded, GuardOnDataDependentSymNode):  # what it makes of other strides, only a run would tell
            seen |= origins
            continue
        if not _alike(node.meta["val"], value):
            behind[node], values[node] = origins, value
    return seen


def _reads_strides(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target in _READERS:
        return True
    function: Any = node.target
    namespace = function.namespace if isinstance(function, torch._ops.OpOverload) else function.__module__
    return namespace not in _KNOWN


def _run(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """The fake value of a node for operands with these values."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values.get(n, n.meta["val"]))
    mode = torch._guards.detect_fake_mode(list(values.values()))
    assert mode is not None
    with mode, enable_python_dispatcher(), torch.no_grad():
        function: Any = node.target
        return function(*args, **kwargs)


def _alike(a: Any, b: Any) -> bool:
    """Whether two values, tensors of one shape or tuples of such, have the same strides where strides matter."""
    if isinstance(a, list | tuple):
        return all(map(_alike, a, b))
    if not isinstance(a, Tensor) or a.layout != torch.strided:
        return True
    return all(same(*pair) for pair in zip(_strides(a), _strides(b), strict=True))


def _strides(value: Tensor) -> Iterator[Size]:
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if not statically_known_true(size == 1):
            yield size_of(stride)


def _in_order(order: tuple[int, ...]) -> Any:
    """Code that lays a tensor out with its dimensions in this order."""
    if [*order] == sorted(order):
        return lambda tensor: tensor.contiguous()
    return lambda tensor: tensor.permute(order).contiguous().permute(inverse(order))
