"""Replace the attention in the Dynamo graph by the code of a rewritten site.

Before   k = cat(linear(latent), k_rope), ...;  o = scaled_dot_product_attention(q, k, v)
After    o = code of the ATen graph, on the nearest values that the Dynamo graph has too

The code may omit inputs of the original attention that a softmax cancels, for instance a bias of all keys. The gradient
of such an input must be zero rather than missing: optimizers apply weight decay to parameters that have a gradient, and
other ranks wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.effects import with_effects
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from mla_compile.dynamo.graph import EXAMPLE
from mla_compile.passes.code.splicing import adopted
from mla_compile.passes.nodes.arguments import is_repeatable
from mla_compile.passes.nodes.memory_order import inverse, order_of
from mla_compile.passes.nodes.refusal import Refusal
from mla_compile.passes.nodes.source import where
from mla_compile.passes.nodes.walk import walk

from .capture import Captured
from .gradients import between, check_gradients, trained_inputs, writes_to

_REARRANGE = {"transpose", "permute", "swapaxes", "contiguous", "reshape", "flatten"}
"""Methods that rearrange or copy elements and accept any strides."""


def splice(captured: Captured, output: fx.Node) -> list[fx.Node]:
    """Let the Dynamo graph compute the ATen node `output` by the code of the ATen graph, and return the new nodes.

    Raises:
        Refusal: if that is not possible; the Dynamo graph is then unchanged.
    """
    nodes = list(ends(captured, output))
    parts = {part.place: part for part in (_Part(captured, node) for node in nodes)}.values()
    for part in parts:
        part.check()
    return [node for part in parts for node in part.put(parts)]


def ends(captured: Captured, output: fx.Node) -> Iterable[fx.Node]:
    """The first nodes from `output` downwards whose values the Dynamo graph has too, computed where they are."""
    for node in walk([output], lambda node: () if node in captured.places else node.users):
        if node in captured.places:
            yield node
        elif node.op == "output":
            raise Refusal(
                output,
                f"expected an attention whose result Dynamo's graph has too, found none there for {where(output)}",
            )


class _Part:
    """A value that both graphs have, and the code that will compute it."""

    def __init__(self, captured: Captured, end: fx.Node) -> None:
        self.captured, self.end, self.place = captured, end, captured.places[end][0]
        self.writes = writes_to(self.place, captured.writes)
        """The later writes to the memory of `place`, which complete its value."""
        self.last = self.writes[-1] if self.writes else self.place
        self.order = {node: i for i, node in enumerate(captured.dynamo.nodes)}
        self.code: list[fx.Node] = []
        """The nodes of the ATen graph to copy, in order."""
        self.sources: dict[fx.Node, fx.Node] = {}
        """The ATen nodes that the code reads, each with the Dynamo node that has its value."""
        self.known: set[fx.Node] = set()
        """All Dynamo nodes with these values."""
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
        # If several nodes have one value, prefer the one from which the attention is computed.
        self.known = {node for nodes in known.values() for node in nodes}
        near = [o for node in between(self.last, self.known, self.captured.writes) for o in node.all_input_nodes]
        nearest = self.known.intersection(near)
        for operand, nodes in known.items():
            there = [node for node in nodes if self._is_complete(node)] or nodes
            self.sources[operand] = next((node for node in there if node in nearest), there[0])

    def _is_complete(self, node: fx.Node) -> bool:
        """Whether a node has the value that it has at the end of a run already where the code is put."""
        return all(self.order[own] < self.order[self.last] for own in (node, *writes_to(node, self.captured.writes)))

    def _replaced(self) -> list[fx.Node]:
        """The Dynamo nodes with that value; writes may return it too."""
        return [self.place, *(node for node in self.writes if node in self.captured.origins[self.end])]

    def check(self) -> None:
        """Raise Refusal if the code cannot be put into the Dynamo graph, or would have other gradients."""
        for node in self.code:
            inner = getattr(self.captured.module, str(node.target), None) if node.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule):  # a graph that an op of the code runs
                calls = [own for own in inner.graph.nodes if own.op not in ("placeholder", "output")]
            else:
                calls = [node]
            if not all(map(_is_function, calls)):
                raise Refusal(self.end, f"expected code of functions of tensors, found {where(node)}")
        if self.place in self.captured.effects:
            reason = f"expected an attention by an operation without effects of its own, found {where(self.place)}"
            raise Refusal(self.end, reason)
        late = [node for node in self.sources.values() if not self._is_complete(node)]
        if late:
            raise Refusal(
                self.end,
                f"expected operands that are computed before the attention, found one that is not, {where(late[0])}",
            )
        check_gradients(self.place, self.known, self.captured.writes)

    def put(self, parts: Iterable[_Part]) -> list[fx.Node]:
        """Replace the Dynamo node by the code, inserted after all writes to it, and return the new nodes.

        Of `parts`, those that are put later may read it.
        """
        graph, known = self.captured.dynamo, dict[fx.Node, Any](self.sources)
        unseen = trained_inputs(self.last, self.known, self.captured.writes)
        devices = self.captured.autocast[self.place]
        with graph.inserting_before(self.last.next if self.writes else self.place):
            # The traced code contains autocast's casts already.
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
                order = order_of(self.place.meta[EXAMPLE])
                for method, arguments in (("permute", order), ("contiguous", []), ("permute", inverse(order))):
                    new = graph.call_method(method, (new, *arguments))
                    new.meta = dict(self.place.meta)
        self._replace_by(new, parts)
        return [known[node] for node in self.code if node.op != "get_attr"]

    def _with_zero_gradient(self, new: fx.Node, unseen: fx.Node) -> fx.Node:
        """The same value, with a zero gradient for `unseen`."""
        graph, nothing = self.captured.dynamo, unseen
        for method, *arguments in ("unsqueeze", 0), ("narrow", 0, 0, 0), ("sum",), ("to", new.meta[EXAMPLE].dtype):
            value = getattr(nothing.meta[EXAMPLE], method)(*arguments)
            nothing = graph.call_method(method, (nothing, *arguments))
            nothing.meta = {**self.place.meta, EXAMPLE: value}
        same = graph.call_method("add", (new, nothing))
        same.meta = dict(new.meta)
        return same

    def _replace_by(self, new: fx.Node, parts: Iterable[_Part]) -> None:
        """Let the readers of the completed value use `new`; writes without readers become dead code."""
        replaced, order = self._replaced(), {node: i for i, node in enumerate(new.graph.nodes)}
        for old in replaced:
            old.replace_all_uses_with(new, lambda user: order[user] > order[new])
        if not self.writes:
            new.graph.erase_node(self.place)
        for origins in self.captured.origins.values():
            origins[:] = dict.fromkeys(new if origin in replaced else origin for origin in origins)
        for part in parts:
            part.sources = {node: new if own in replaced else own for node, own in part.sources.items()}

    def _call(self, function: Any, *arguments: Any) -> fx.Node:
        return self.captured.dynamo.call_function(function, arguments)


def _is_function(node: fx.Node) -> bool:
    """Whether a node always computes the same, writes to nothing, has no other effects, and has a derivative."""
    if node.target in (torch.ops.aten.copy.default, with_effects):
        return False
    return is_repeatable(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.op == "call_function"


def _with_gradient(value: Any, place: fx.Node) -> Any:
    """The fake values with `requires_grad` set as for the attention's result."""

    def require(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point() and place.meta[EXAMPLE].requires_grad)

    return pytree.tree_map_only(Tensor, require, value)


def _laid_out_alike(node: fx.Node, value: Tensor) -> bool:
    """Whether no reader of a node would notice if it had the strides of `value`."""
    pairs = zip(_strides(node.meta[EXAMPLE]), _strides(value), strict=True)
    if all(a is b or (None not in (a, b) and statically_known_true(a == b)) for a, b in pairs):
        return True
    for user in node.users:
        if user.op != "call_method" or user.target not in _REARRANGE or user.all_input_nodes != [node]:
            return False
        if not _laid_out_alike(user, getattr(value, str(user.target))(*user.args[1:], **user.kwargs)):
            return False
    return True


def _strides(value: Tensor) -> list[Any]:
    """The strides that matter; None for dimensions with one element."""
    pairs = zip(value.stride(), value.shape, strict=True)
    return [None if isinstance(size, int) and size == 1 else stride for stride, size in pairs]
