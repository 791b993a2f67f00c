"""Put the code of a rewritten site where the Dynamo graph has the attention.

Before   k = cat(linear(latent), k_rope), ...;  o = scaled_dot_product_attention(q, k, v)
After    o = code of the ATen graph, of the nearest values that the Dynamo graph has too

What the code does without, though the attention is made of it, is what a softmax does not see, a bias of all keys for
instance. Its gradient is zero, and not missing: optimizers decay what has one, and ranks wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from mla_compile.dynamo_graph import EXAMPLE
from mla_compile.passes.code.splicing import adopted
from mla_compile.passes.nodes.arguments import is_repeatable
from mla_compile.passes.nodes.refusal import Refusal
from mla_compile.passes.nodes.source import where
from mla_compile.passes.nodes.walk import walk

from .capture import Captured
from .gradients import between, check_gradients, trained_inputs, writes_to

_REARRANGE = {"transpose", "permute", "swapaxes", "contiguous", "reshape", "flatten"}
"""Methods that ask for no strides, and keep or copy elements."""


def splice(captured: Captured, output: fx.Node) -> list[fx.Node]:
    """Let the Dynamo graph compute the value of `output`, of the ATen graph, as that does; returns its new nodes.

    Raises:
        Refusal: if it cannot; the Dynamo graph is as it was.
    """
    nodes = list(ends(captured, output))
    parts = {part.place: part for part in (_Part(captured, node) for node in nodes)}.values()
    for part in parts:
        part.check()
    return [node for part in parts for node in part.put()]


def ends(captured: Captured, output: fx.Node) -> Iterable[fx.Node]:
    """The first nodes from `output` on that the Dynamo graph has too."""
    for node in walk([output], lambda node: () if node in captured.origins else node.users):
        if node in captured.origins:
            yield node
        elif node.op == "output":
            raise Refusal(output, f"expected attention whose result Dynamo's graph has, found none for {where(output)}")


class _Part:
    """A value of both graphs, and the code that is to compute it."""

    def __init__(self, captured: Captured, end: fx.Node) -> None:
        self.captured, self.end, self.place = captured, end, captured.origins[end][0]
        self.writes = writes_to(self.place)
        """What makes the value at `place` that of the end of a run."""
        self.last = self.writes[-1] if self.writes else self.place
        self.code: list[fx.Node] = []
        """Nodes of the ATen graph, in order."""
        self.sources: dict[fx.Node, fx.Node] = {}
        """Nodes of the ATen graph that the code reads, and those of the Dynamo graph that are the same."""
        self.known: set[fx.Node] = set()
        """Those, and others of the same values."""
        self._collect()

    def _collect(self) -> None:
        wanted, pending, known = {self.end}, [self.end], dict[fx.Node, list[fx.Node]]()
        while pending:
            for operand in pending.pop().all_input_nodes:
                if operand in self.captured.origins:
                    known[operand] = self.captured.origins[operand]
                elif operand not in wanted:
                    wanted.add(operand)
                    pending.append(operand)
        self.code = [node for node in self.end.graph.nodes if node in wanted]
        # Of several nodes of one value, a detached one for instance, the one that the attention is made of.
        self.known = {node for nodes in known.values() for node in nodes}
        nearest = self.known.intersection(o for node in between(self.last, self.known) for o in node.all_input_nodes)
        for operand, nodes in known.items():
            near = [node for node in nodes if node in nearest]
            self.sources[operand] = near[0] if len(near) == 1 else nodes[0]

    def _replaced(self) -> list[fx.Node]:
        """Nodes of the Dynamo graph with that value: of what is written to, what writes may return it too."""
        return [self.place, *(node for node in self.writes if node in self.captured.origins[self.end])]

    def check(self) -> None:
        """Raises: Refusal, if the code cannot stand in the Dynamo graph, or would have other gradients."""
        for node in self.code:
            inner = getattr(self.captured.module, str(node.target), None) if node.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule):  # what an op of the code runs
                calls = [own for own in inner.graph.nodes if own.op not in ("placeholder", "output")]
            else:
                calls = [node]
            if not all(map(_is_function, calls)):
                raise Refusal(self.end, f"expected code of functions of tensors, found {where(node)}")
        earlier = set[fx.Node]()
        for node in self.captured.dynamo.nodes:
            if node is self.last:
                break
            earlier.add(node)
        late = [node for node in self.sources.values() if node not in earlier]
        if late:
            raise Refusal(self.end, f"expected operands that come before the attention, found {where(late[0])}")
        check_gradients(self.last, set(self.sources.values()))

    def put(self) -> list[fx.Node]:
        """Replace the node of the Dynamo graph by others, after all that writes to it."""
        graph, known = self.captured.dynamo, dict[fx.Node, Any](self.sources)
        unseen = trained_inputs(self.last, self.known)
        devices = self.captured.autocast[self.place]
        with graph.inserting_before(self.last.next if self.writes else self.place):
            # What is traced has been cast already.
            entered = [self._call(torch.amp.autocast_mode._enter_autocast, d, None, False, None) for d in devices]
            for node in self.code:
                if node.op == "get_attr":
                    known[node] = graph.get_attr(adopted(graph, self.captured.module.get_submodule(str(node.target))))
                    continue
                known[node] = graph.node_copy(node, lambda n: known[n])
                meta = self.place.meta if node is self.end else node.meta
                known[node].meta = {key: value for key, value in meta.items() if key != "val"}
                known[node].meta[EXAMPLE] = _with_gradient(node.meta["val"], self.place)
            for context in reversed(entered):
                self._call(torch.amp.autocast_mode._exit_autocast, context)
            new = known[self.end]
            for node in unseen:
                new = self._with_zero_gradient(new, node)
            if not _laid_out_alike(self.place, new.meta[EXAMPLE]):
                order = _order(self.place.meta[EXAMPLE])
                inverse = [order.index(i) for i in range(len(order))]
                for method, arguments in (("permute", order), ("contiguous", []), ("permute", inverse)):
                    new = graph.call_method(method, (new, *arguments))
                    new.meta = dict(self.place.meta)
        self._replace_by(new)
        return [known[node] for node in self.code if node.op != "get_attr"]

    def _with_zero_gradient(self, new: fx.Node, unseen: fx.Node) -> fx.Node:
        """The same value, of which the gradient of `unseen` is zero."""
        graph, nothing = self.captured.dynamo, unseen
        for method, *arguments in ("unsqueeze", 0), ("narrow", 0, 0, 0), ("sum",), ("to", new.meta[EXAMPLE].dtype):
            value = getattr(nothing.meta[EXAMPLE], method)(*arguments)
            nothing = graph.call_method(method, (nothing, *arguments))
            nothing.meta = {**self.place.meta, EXAMPLE: value}
        same = graph.call_method("add", (new, nothing))
        same.meta = dict(new.meta)
        return same

    def _replace_by(self, new: fx.Node) -> None:
        """Let whoever reads the value at the end of a run have `new`; what else is written is left to die."""
        replaced, order = self._replaced(), {node: i for i, node in enumerate(new.graph.nodes)}
        for old in replaced:
            old.replace_all_uses_with(new, lambda user: order[user] > order[new])
        if not self.writes:
            new.graph.erase_node(self.place)
        for origins in self.captured.origins.values():
            origins[:] = dict.fromkeys(new if origin in replaced else origin for origin in origins)

    def _call(self, function: Any, *arguments: Any) -> fx.Node:
        return self.captured.dynamo.call_function(function, arguments)


def _is_function(node: fx.Node) -> bool:
    """Whether a node computes the same each time, and writes to nothing."""
    return is_repeatable(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.op == "call_function"


def _with_gradient(value: Any, place: fx.Node) -> Any:
    """Fake values that require gradients if the attention does, as they would where that is made of them."""

    def require(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point() and place.meta[EXAMPLE].requires_grad)

    return pytree.tree_map_only(Tensor, require, value)


def _laid_out_alike(node: fx.Node, value: Tensor) -> bool:
    """Whether nobody who reads a node would see that its value has the strides of `value`."""
    if _strides(node.meta[EXAMPLE]) == _strides(value):
        return True
    for user in node.users:
        if (
            user.op != "call_method"
            or user.target not in _REARRANGE
            or any(isinstance(a, fx.Node) for a in user.args[1:])
        ):
            return False
        if not _laid_out_alike(user, getattr(value, str(user.target))(*user.args[1:], **user.kwargs)):
            return False
    return True


def _strides(value: Tensor) -> list[Any]:
    """The strides that say where elements are: not of a dimension that has one."""
    pairs = zip(value.stride(), value.shape, strict=True)
    return [None if isinstance(size, int) and size == 1 else stride for stride, size in pairs]


def _order(value: Tensor) -> list[int]:
    """The dimensions of a tensor, the one of the longest stride first."""
    strides = value.stride()
    return sorted(range(value.dim()), key=lambda i: -strides[i])
