"""Check that nothing in a part of a Dynamo graph stops gradients or changes them on their way."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mla_compile.dynamo.graph import tensors_of
from mla_compile.passes.nodes.refusal import Refusal
from mla_compile.passes.nodes.source import where

_WRITE = {"setitem", "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow"}
_WRITE |= {"irshift", "isub", "itruediv", "ixor"}
"""The names of functions of `operator` that write to their first argument."""
_OF_SIZES = {f"{value}_like" for value in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")} | {
    f"new_{value}" for value in ("empty", "full", "ones", "tensor", "zeros")
}
"""The names of functions that take only sizes, dtype and device from their first argument."""


def check_gradients(end: fx.Node, sources: Collection[fx.Node]) -> None:
    """Check that all nodes from `sources` to `end` pass gradients on.

    A detached tensor does not pass gradients on, unless it is the maximum of scores that is subtracted from these;
    neither does a tensor computed without gradients. Higher-order operators, which include autograd functions, and
    tensors with hooks are refused too, since nothing is known about their gradients.

    Raises:
        Refusal: if such a node is found.
    """
    if not _records(end):
        return
    for node in between(end, sources):
        if any("hook" in _name(user) for user in node.users):
            raise Refusal(
                end, f"expected no gradient hooks between the projections and the attention, found one at {where(node)}"
            )
        results = [value for value in tensors_of(node) if value.is_floating_point() or value.is_complex()]
        if isinstance(node.target, torch._ops.HigherOrderOperator) and any(value.requires_grad for value in results):
            raise Refusal(end, f"expected operations whose gradients are torch's own, found {where(node)}")
        operands = node.all_input_nodes[1:] if _name(node) in _OF_SIZES else node.all_input_nodes
        given = [value for operand in operands for value in tensors_of(operand)]
        ends = results and any(v.requires_grad for v in given) and not any(v.requires_grad for v in results)
        if ends and not _is_taken_from_its_own(node):
            reason = (
                "expected gradients to flow through all operands of the attention, found that "
                f"they end at {where(node)}"
            )
            raise Refusal(end, reason, "detach the inputs of the projections instead, or nothing")


def trained_inputs(end: fx.Node, sources: Collection[fx.Node]) -> list[fx.Node]:
    """The inputs of the graph that gradients of `end` reach on paths that avoid all of `sources`."""
    nodes = list(between(end, sources))
    written = {s for node in nodes if _writes(node) for operand in node.all_input_nodes for s in _storages(operand)}
    closed = {
        node
        for node in nodes
        if not any(value.requires_grad for value in tensors_of(node)) and written.isdisjoint(_storages(node))
    }
    found = {*between(end, {*sources, *closed})}
    return [node for node in nodes if node.op in ("placeholder", "get_attr") and node in found]


def _is_taken_from_its_own(node: fx.Node) -> bool:
    """Whether a tensor is the maximum of another along a dimension and is only subtracted from that: the softmax of the
    difference does not depend on the maximum, so that needs no gradient."""
    greatest = node
    while _hands_on(greatest):
        greatest = greatest.all_input_nodes[0]
    if _name(greatest) not in {"amax", "max"} or len(greatest.all_input_nodes) != 1:
        return False
    pending = [greatest]
    while pending:
        taken = pending.pop()
        for user in taken.users:
            if _hands_on(user):
                pending.append(user)
            elif _name(user) != "sub" or user.kwargs or user.args != (greatest.all_input_nodes[0], taken):
                return False
    return True


def _hands_on(node: fx.Node) -> bool:
    """Whether a node is a detached copy of its input, or the values of a `max`."""
    if _name(node) == "getitem":
        return bool(node.args[1] == 0) and _name(node.all_input_nodes[0]) == "max"
    return _name(node) == "detach"


def _records(end: fx.Node) -> bool:
    """Whether gradients are enabled at a node."""
    records = True
    for node in end.graph.nodes:
        if node is end:
            break
        if node.target is torch._C._set_grad_enabled:
            records = bool(node.args[0])
    return records


def between(end: fx.Node, sources: Collection[fx.Node]) -> Iterator[fx.Node]:
    """`end` and all nodes from which it is computed, back to `sources`, including writes to tensors on the way."""
    writes: dict[Any, list[fx.Node]] = {}
    for node in end.graph.nodes:
        if node is end:
            break
        for storage in [s for operand in node.all_input_nodes for s in _storages(operand)] if _writes(node) else ():
            writes.setdefault(storage, []).append(node)
    pending, seen = [end], {end}
    while pending:
        node = pending.pop()
        yield node
        written = [write for storage in _storages(node) for write in writes.get(storage, ())]
        for other in (*node.all_input_nodes, *written):
            if other not in seen and other not in sources:
                seen.add(other)
                pending.append(other)


def writes_to(place: fx.Node) -> list[fx.Node]:
    """The later nodes that write to the memory of a node, in order."""
    own, later = set(_storages(place)), list(place.graph.nodes)
    return [
        node
        for node in later[later.index(place) + 1 :]
        if _writes(node) and own.intersection(s for operand in _overwritten(node) for s in _storages(operand))
    ]


def _overwritten(node: fx.Node) -> list[fx.Node]:
    """The inputs to which a node that writes may write: those named `out`, else the first."""
    if "out" not in node.kwargs:
        return node.all_input_nodes[:1]
    return [out for out in pytree.tree_leaves(node.kwargs["out"]) if isinstance(out, fx.Node)]


def _writes(node: fx.Node) -> bool:
    """Whether a node may write to its inputs."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name = _name(node)
    return name in _WRITE or "out" in node.kwargs or (name.endswith("_") and not name.endswith("__"))


def _storages(node: fx.Node) -> list[Any]:
    return [value.untyped_storage()._cdata for value in tensors_of(node)]


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
