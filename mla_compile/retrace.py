"""The second trace: a rewritten graph with Inductor's decompositions.

Most of a graph is what it was before the passes. A call that they left, of an op that no decomposition touches, with
arguments that are what they were, gives what it gave: only its node is made again. Running it on fake tensors takes
several times as long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import _recursive_joint_graph_passes
from torch._inductor.decomposition import select_decomp_table
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import (
    fetch_sym_proxy,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_original_aten_op,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from .mm_of_one_row import mm_of_one_row
from .ops import SEALED
from .same_numbers import merge_same_numbers
from .seal import unseal

aten = torch.ops.aten
Table = Mapping[Any, Callable[..., Any]]
Calls = Mapping[fx.Node, object]
"""The arguments of every call of a graph, by its node."""


def calls_of(graph: fx.Graph) -> Calls:
    """What a graph calls before the passes, for `retrace` to tell what they left."""
    return {node: (node.args, node.kwargs) for node in graph.nodes if node.op == "call_function"}


def retrace(module: fx.GraphModule, before: Calls) -> fx.GraphModule:
    """Trace a rewritten graph again with Inductor's decompositions, and run the passes of Inductor that come first.

    `before` are the calls of the graph before it was rewritten, to whose results `meta["val"]` is true.
    """
    placeholders = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    table: Table = {**select_decomp_table(), SEALED: unseal, aten.mm.default: mm_of_one_row}
    mode = detect_fake_mode(placeholders)
    with torch._C._DisableAutocast(), torch.fx.traceback.preserve_node_meta(), mode or contextlib.nullcontext():
        again = _Again(module, table, before)
        retraced = make_fx(lambda *args: again.run(*args), decomposition_table=table)(*placeholders)
    old, new = (m.graph.output_node() for m in (module, retraced))
    new.meta.update({k: v for k, v in old.meta.items() if k != "val"})
    retraced.meta.update(module.meta)
    if merge_same_numbers(retraced.graph):
        retraced.recompile()
    return _recursive_joint_graph_passes(retraced)


class _Again(fx.Interpreter):
    """Runs what has changed, or may be decomposed; of all else it makes the node."""

    def __init__(self, module: fx.GraphModule, table: Table, before: Calls) -> None:
        super().__init__(module)
        self._table, self._before = table, before
        self._node: fx.Node

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (op := self._op_that_stays(args, kwargs)) is not None:
            made = _make(op, args, kwargs, self._node.meta["val"])
            if made is not None:
                return made
        return super().call_function(target, args, kwargs)

    def _op_that_stays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpOverload | None:
        """What to call for the result that the node had; None if that has to be found out."""
        node, target = self._node, self._node.target
        if self._before.get(node) != (node.args, node.kwargs):
            return None
        if type(node.meta.get("val")) is not FakeTensor or "unbacked_bindings" in node.meta:
            return None
        had = pytree.tree_map_only(fx.Node, lambda n: n.meta.get("val"), (node.args, node.kwargs))
        pairs = list(zip(pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(had), strict=True))
        tensors = [(now, then) for now, then in pairs if isinstance(now, Tensor)]
        untouched = all(now is then for now, then in tensors)
        if target is aten.reshape.default and untouched and _shares_memory(args[0], node.meta["val"]):
            return aten.view.default
        if not isinstance(target, OpOverload) or target in self._table or not _is_elementary(target):
            return None
        # Who makes a view has to make it of the memory that there is now.
        if untouched or (not _is_view(target) and all(_is_like(now, then) for now, then in tensors)):
            return target
        return None


def _make(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: FakeTensor) -> FakeTensor | None:
    """The node of a call that is known to give `result`, in the graph that is being traced; None if it has to run."""
    mode = get_proxy_mode()
    assert mode is not None
    tracer: Any = mode.tracer
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    slots: dict[int, Any] = {id(tensor): get_proxy_slot(tensor, tracer, None) for tensor in tensors}
    if any(slot is None or slot.constant is not None for slot in slots.values()):
        return None
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: slots[id(t)].proxy, (args, kwargs))
    args, kwargs = pytree.tree_map_only(torch.SymInt | torch.SymFloat, fetch_sym_proxy(tracer), (args, kwargs))
    name = tracer.graph._target_to_str(op.overloadpacket.__name__)
    with set_original_aten_op(op):
        proxy = tracer.create_proxy("call_function", op, args, kwargs, name=name)
    return track_tensor_tree(result, proxy, constant=None, tracer=tracer)


@cache
def _is_elementary(op: OpOverload) -> bool:
    """Whether a call is no composition of others, and makes new tensors or views of its arguments and nothing more."""
    if op._schema.is_mutable or op is aten.lift_fresh.default:
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


@cache
def _is_view(op: OpOverload) -> bool:
    return any(value.alias_info is not None for value in op._schema.returns)


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _is_like(now: Tensor, then: Any) -> bool:
    """Whether two fake tensors are the same but for their memory. Asks nothing of symbols that would be a guard."""
    return (
        type(then) is FakeTensor
        and (now.dtype, now.device, now.layout) == (then.dtype, then.device, then.layout)
        and _sizes(now) == _sizes(then)
    )


def _sizes(tensor: Tensor) -> list[Any]:
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes]
