"""Check that nothing in a part of a Dynamo graph stops gradients or changes them on their way."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mla_compile.dynamo.graph import tensors_of
from mla_compile.passes.nodes.refusal import Refusal
from mla_compile.passes.nodes.source import where

Writes = Mapping[fx.Node, Sequence[fx.Node]]
"""For nodes that write to memory, the operands to whose memory they write."""
_OF_SIZES = {f"{value}_like" for value in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")} | {
    f"new_{value}" for value in ("empty", "full", "ones", "tensor", "zeros")
}
"""The names of functions that take only sizes, dtype and device from their first argument."""
_LIKE_ANOTHER = {"expand_as", "reshape_as", "to", "type_as", "view_as"}
"""The names of methods that take only sizes, dtype and device from their second argument."""
_DETACHING = {"detach", "_get_data_attr"}
"""The names of `detach` and `data`."""


def check_gradients(place: fx.Node, sources: Collection[fx.Node], writes: Writes) -> None:
    """Check that all nodes from `sources` to `place`, and the writes that complete its value, pass gradients on.

    A detached tensor does not pass gradients on, unless it is the maximum of scores that is subtracted from these;
    neither does a tensor computed without gradients. A write without gradients passes them on as if nothing had been
    written. Higher-order operators, which include autograd functions, and tensors with hooks are refused too, since
    nothing is known about their gradients.

    Raises:
        Refusal: if such a node is found.
    """
    completed = place, *writes_to(place, writes)
    end, silent = completed[-1], _without_gradients(place.graph)
    if silent.issuperset(completed):
        return
    for node in _above(end, sources, writes):
        if any("hook" in _name(user) for user in node.users):
            raise Refusal(
                end, f"expected no gradient hooks between the projections and the attention, found one at {where(node)}"
            )
        if node in silent and node in writes and _takes_trained(node):
            reason = f"expected writes that gradients see, found one without gradients at {where(node)}"
            raise Refusal(end, reason, "write with gradients, or to a tensor that needs none")
    for node in between(end, sources, writes):
        if isinstance(node.target, torch._ops.HigherOrderOperator) and any(v.requires_grad for v in _numbers(node)):
            raise Refusal(end, f"expected operations whose gradients are torch's own, found {where(node)}")
        if _ends(node) and not _is_taken_from_its_own(node):
            reason = (
                "expected gradients to flow through all operands of the attention, found that "
                f"they end at {where(node)}"
            )
            raise Refusal(end, reason, "detach the inputs of the projections instead, or nothing")


def _above(end: fx.Node, sources: Collection[fx.Node], writes: Writes) -> Iterator[fx.Node]:
    """`end` and what it is computed from, as far as that is computed from `sources`: also between two of these, as code
    that reads the deeper one may leave out what lies between."""
    own, above, written = set(between(end, (), writes)), set(sources), set[Any]()
    for node in end.graph.nodes:
        read = node.all_input_nodes
        if node in own and not (above.isdisjoint(read) and written.isdisjoint(s for n in read for s in _storages(n))):
            above.add(node)
            written.update(storage for operand in writes.get(node, ()) for storage in _storages(operand))
            yield node


def _numbers(node: fx.Node) -> list[Tensor]:
    """The fake tensors that a node makes and that could have gradients."""
    return [value for value in tensors_of(node) if value.is_floating_point() or value.is_complex()]


def _takes_trained(node: fx.Node) -> bool:
    return any(value.requires_grad for operand in _operands(node) for value in tensors_of(operand))


def _ends(node: fx.Node) -> bool:
    """Whether a node makes numbers without gradients from some that have them."""
    return bool(_numbers(node)) and _takes_trained(node) and not any(v.requires_grad for v in _numbers(node))


@dataclass(frozen=True)
class Ends:
    """Where gradients end in a Dynamo graph, by the names of nodes."""

    here: frozenset[str]
    """Nodes that make numbers without gradients from some that have them, such as `detach`."""
    silent: frozenset[str]
    """Nodes that run where gradients are off."""
    lost: frozenset[str]
    """Those of them whose results would have gradients otherwise."""


def ends_of_gradients(graph: fx.Graph) -> Ends:
    """Where gradients end, except in a maximum of scores that is only subtracted from these.

    The fake values tell what has gradients at the end of a run: of a tensor without, if something with gradients was
    written to it since, that it has them. So for what never has gradients as it is made, they are not asked.
    """
    silent = _without_gradients(graph)
    ends, lost = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if node in silent and _numbers(node) and (_takes_trained(node) or not lost.isdisjoint(_operands(node))):
            lost.add(node)
        elif _ends(node) or (_name(node) in _DETACHING and _takes_trained(node)):
            ends.add(node)
    sets = (
        {n for n in ends if not _is_taken_from_its_own(n)},
        silent,
        {n for n in lost if not _is_taken_from_its_own(n)},
    )
    return Ends(*(frozenset(node.name for node in nodes) for nodes in sets))


def trained_inputs(end: fx.Node, sources: Collection[fx.Node], writes: Writes) -> list[fx.Node]:
    """The inputs of the graph that gradients of `end` reach on paths that avoid all of `sources`."""
    nodes = list(between(end, sources, writes))
    written = {storage for node in nodes for operand in writes.get(node, ()) for storage in _storages(operand)}
    closed = {
        node
        for node in nodes
        if node not in writes
        and not any(value.requires_grad for value in tensors_of(node))
        and written.isdisjoint(_storages(node))
    }
    found = {*between(end, {*sources, *closed}, writes)}
    return [node for node in nodes if node.op in ("placeholder", "get_attr") and node in found]


def _is_taken_from_its_own(node: fx.Node) -> bool:
    """Whether a tensor is the maximum of another along a dimension, or made of that alone, as where it is not finite,
    and is only subtracted from what it is the maximum of: the softmax of the difference does not depend on it, so that
    it needs no gradient."""
    made = _made_of_maximum(node)
    if made is None:
        return False
    greatest, steps = made
    pending = [greatest]
    while pending:
        taken = pending.pop()
        for user in taken.users:
            if user in steps or _hands_on(user):
                pending.append(user)
            elif _name(user) != "sub" or user.kwargs or user.args != (greatest.all_input_nodes[0], taken):
                return False
    return True


_STEPS = 8
"""Ops behind a maximum that is made finite: a comparison, its negation, the choice of a number, views, a detach."""


def _made_of_maximum(node: fx.Node) -> tuple[fx.Node, set[fx.Node]] | None:
    """The only maximum that a tensor is made of, and all that is made of it on the way; None if there is none."""
    greatest, steps, pending = None, set[fx.Node](), [node]
    while pending:
        step = pending.pop()
        if _name(step) in {"amax", "max"} and len(step.all_input_nodes) == 1:
            if greatest not in (None, step):
                return None
            greatest = step
        elif step.op not in ("call_function", "call_method") or len(steps) > _STEPS:
            return None
        elif step not in steps:
            steps.add(step)
            pending += step.all_input_nodes
    return None if greatest is None else (greatest, steps)


def _hands_on(node: fx.Node) -> bool:
    """Whether a node is a detached copy of its input, or the values of a `max`."""
    if _name(node) == "getitem":
        return bool(node.args[1] == 0) and _name(node.all_input_nodes[0]) == "max"
    return _name(node) == "detach"


def _without_gradients(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a graph that run where gradients are off."""
    off, modes, silent = False, set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            off = not node.args[0]
        elif node.target is torch.autograd.grad_mode._enter_inference_mode and node.args[0]:
            modes.add(node)
        elif node.target is torch.autograd.grad_mode._exit_inference_mode:
            modes.difference_update(node.all_input_nodes)
        elif off or modes:
            silent.add(node)
    return silent


def between(end: fx.Node, sources: Collection[fx.Node], writes: Writes) -> Iterator[fx.Node]:
    """`end` and all nodes whose numbers it is computed from, back to `sources`, including writes to tensors on the
    way."""
    written: dict[Any, list[fx.Node]] = {}
    for node in end.graph.nodes:
        if node is end:
            break
        for storage in [storage for operand in writes.get(node, ()) for storage in _storages(operand)]:
            written.setdefault(storage, []).append(node)
    pending, seen = [end], {end}
    while pending:
        node = pending.pop()
        yield node
        to_it = [write for storage in _storages(node) for write in written.get(storage, ())]
        for other in (*_operands(node), *to_it):
            if other not in seen and other not in sources:
                seen.add(other)
                pending.append(other)


def _operands(node: fx.Node) -> list[fx.Node]:
    """The operands whose numbers a node reads."""
    operands = node.all_input_nodes
    if _name(node) in _OF_SIZES:
        return operands[1:]
    return operands[:1] if node.op == "call_method" and _name(node) in _LIKE_ANOTHER else operands


def writes_to(place: fx.Node, writes: Writes) -> list[fx.Node]:
    """The later nodes that write to the memory of a node, in order."""
    own, later = set(_storages(place)), list(place.graph.nodes)
    return [
        node
        for node in later[later.index(place) + 1 :]
        if own.intersection(s for operand in writes.get(node, ()) for s in _storages(operand))
    ]


def _storages(node: fx.Node) -> list[Any]:
    return [value.untyped_storage()._cdata for value in tensors_of(node)]


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
