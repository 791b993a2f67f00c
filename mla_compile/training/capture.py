"""Trace a Dynamo graph to the functional ATen graph that the passes read, and map the nodes of one to the other.

The ATen graph serves only for analysis and as a source of code: the graph that is differentiated is Dynamo's.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, to_fun
from torch._library.effects import EffectType
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mla_compile.dynamo.control_flow import is_operator
from mla_compile.dynamo.graph import EXAMPLE
from mla_compile.dynamo.seal import seal
from mla_compile.passes.nodes.arguments import aten
from mla_compile.passes.nodes.common_subexpressions import CommonSubexpressions
from mla_compile.passes.nodes.constants import constant_of
from mla_compile.passes.nodes.gradients import end_gradients, ends_gradients, give_own_gradients

from .gradients import Ends, ends_of_gradients

_WRITING = ("triton_kernel_wrapper_mutation", "auto_functionalized", "with_effects")
"""Prefixes of the names of higher-order operators that write to their inputs."""
_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
_SAME = (aten.detach.default, aten.alias.default)


class NotCaptured(Exception):
    """A graph cannot be captured; the message says what was expected and what was found."""


@dataclass(frozen=True)
class Captured:
    """A Dynamo graph and the corresponding functional ATen graph."""

    dynamo: fx.Graph
    module: fx.GraphModule
    origins: dict[fx.Node, list[fx.Node]]
    """For nodes of the ATen graph, the nodes of the Dynamo graph with the same value at the end of a run, in order."""
    given: tuple[str, ...]
    """The names of the nodes of the Dynamo graph whose values are the inputs of the ATen graph."""
    autocast: dict[fx.Node, tuple[str, ...]]
    """For nodes of the Dynamo graph, the device types for which autocast is on."""

    writes: dict[fx.Node, list[fx.Node]]
    """For nodes of the Dynamo graph that write to memory, the operands to whose memory they write."""
    effects: frozenset[fx.Node]
    """The nodes of the Dynamo graph that do more than compute: they print, or raise if a matrix is singular."""
    places: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """The origins before `share_origins`: of two calls of one layer, each has its own."""

    def share_origins(self) -> None:
        """Give nodes that compute the same value the same origins."""
        self.places.update({node: list(own) for node, own in self.origins.items()})
        same, origins = CommonSubexpressions(), dict[fx.Node, list[fx.Node]]()
        firsts: dict[fx.Node, fx.Node] = {}
        for node in self.module.graph.nodes:
            first = same.first(node)
            same_value = node.target in _SAME and not ends_gradients(node)
            firsts[node] = firsts[node.all_input_nodes[0]] if same_value else first
        for node, first in firsts.items():
            origins.setdefault(first, []).extend(self.origins.get(node, ()))
        order = {node: i for i, node in enumerate(self.dynamo.nodes)}
        for node, first in firsts.items():
            if origins[first]:
                self.origins[node] = sorted(set(origins[first]), key=order.__getitem__)


def capture(module: fx.GraphModule) -> Captured:
    """Trace a Dynamo graph to an ATen graph, without gradients. The Dynamo graph stays as it is.

    Results of higher-order operators, and sizes that are known only at run time, are inputs of the ATen graph.

    Raises:
        NotCaptured: if that is not possible.
    """
    sealed = fx.GraphModule(module, copy.deepcopy(module.graph))
    seal(sealed)
    nodes = {node.name: node for node in module.graph.nodes}
    given = {name: _leaves(node) for name, node in nodes.items() if _is_given(node)}
    examples = [leaf for leaves in given.values() for leaf in leaves]
    if any(is_traceable_wrapper_subclass(value) for value in examples):
        raise NotCaptured("expected plain tensors where gradients are needed, found a subclass of Tensor")
    mode = torch._guards.detect_fake_mode(examples)
    if mode is None:
        raise NotCaptured("expected a graph from Dynamo, with fake values, found none")
    values = [_alike(value, mode) for value in examples]
    ends = ends_of_gradients(module.graph)
    names: list[str] = []
    autocast: dict[fx.Node, tuple[str, ...]] = {}
    writes: dict[fx.Node, list[fx.Node]] = {}
    effects: set[fx.Node] = set()
    written: list[bool] = []

    def run(tokens: dict[Any, Tensor], *leaves: Any) -> list[Any]:
        supply = iter(leaves)
        values = {name: [next(supply) for _ in own] for name, own in given.items()}
        interpreter = _Interpreter(sealed, values, ends, tokens)
        interpreter.run(enable_io_processing=False)
        autocast.update({nodes[name]: types for name, types in interpreter.autocast.items()})
        writes.update({nodes[name]: [nodes[own] for own in into] for name, into in interpreter.writes.items()})
        effects.update(nodes[name] for name in interpreter.effects)
        named = [*interpreter.values.items(), *interpreter.detached]
        tensors = [(name, value) for name, value in named if isinstance(value, Tensor)]
        names[:] = [name for name, _ in tensors]
        return [value for _, value in tensors] + interpreter.without_gradients()

    def functional(*leaves: Any) -> list[Any]:
        with FunctionalTensorMode() as functions:
            # Ops with effects take a token and give the next one, which keeps their order, as in AOTAutograd's graphs.
            functions._tokens.update({effect: torch.empty(0) for effect in EffectType})
            wrapped = [to_fun(leaf) for leaf in leaves]
            results = [from_fun(value) for value in run(functions._tokens, *wrapped)]
        written[:] = [isinstance(leaf, Tensor) and has_data_mutation(leaf) for leaf in wrapped]
        return results

    try:
        with mode, torch.no_grad(), enable_python_dispatcher(), torch.fx.traceback.preserve_node_meta():
            # Without any table, torch >= 2.15 writes aliases, which have gradients, for `detach`.
            traced = make_fx(functional, decomposition_table={}, tracing_mode="real")(*values)
    except Exception as error:  # torch may compile this graph in other ways, so it is left to stock Inductor
        if _raised_here(error):
            raise
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        if any(getattr(node.target, "__name__", "") == "_vmap_increment_nesting" for node in module.graph.nodes):
            found = "torch.func.vmap"
        raise NotCaptured(f"expected a graph that can be traced without gradients, found {found}") from error
    _end_gradients(traced, len(names))
    _write_numbers_out(traced)
    _read_numbers_as_tensors(traced)
    _make_copies_differentiable(traced)
    _refuse_shared_memory(examples, written)
    inputs = [nodes[name] for name, own in given.items() for _ in own]
    for placeholder, node in zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if is_operator(node, ("autograd_function_apply",)):
            give_own_gradients(placeholder, node)
    origins = _origins(traced, [nodes[name] for name in names], inputs)
    _return(traced, module.graph, origins)
    return Captured(module.graph, traced, origins, tuple(given), autocast, writes, frozenset(effects))


def _end_gradients(traced: fx.GraphModule, count: int) -> None:
    """Mark where gradients end: the outputs after `count`, which are dropped, and detached tensors that views of
    written memory were made of again. Other detached tensors need no gradients at all."""
    output = traced.graph.output_node()
    (values,) = output.args
    assert isinstance(values, list | tuple)
    ended, known = set(values[count:]), set(values)
    output.args = (list(values[:count]),)
    for node in traced.graph.find_nodes(op="call_function", target=aten.detach.default):
        if node in ended or node not in known:
            end_gradients(node)
        else:
            node.target = aten.alias.default


def _alike(value: Any, mode: FakeTensorMode) -> Any:
    """A copy of a fake tensor in another fake mode, as Dynamo deactivates its own before it calls a backend.

    A number that may change from call to call is a tensor without dimensions that knows the symbol of its element.
    """
    if not isinstance(value, Tensor):
        return value
    with mode:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if isinstance(value, FakeTensor) and (number := value.item_memo) is not None:
        assert isinstance(made, FakeTensor)
        made.item_memo = number
    return made


def _write_numbers_out(traced: fx.GraphModule) -> None:
    """Replace constant tensors of one number, which assignments of numbers make, by code that Dynamo's graph can
    have."""
    for node in traced.graph.find_nodes(op="get_attr"):
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.is_complex():
            continue
        number = constant_of(node)
        if number is None or (not value.is_floating_point() and abs(number) > 2**53):  # a float holds all up to there
            continue
        number = number if value.is_floating_point() else int(number)
        with traced.graph.inserting_before(node):
            own: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
            full = traced.graph.call_function(aten.full.default, ([*value.shape], number), own)
        full.meta = dict(node.meta)
        node.replace_all_uses_with(full)
        traced.graph.erase_node(node)


def _read_numbers_as_tensors(traced: fx.GraphModule) -> None:
    """Give arithmetic of floats the tensors without dimensions in the place of their elements, numbers that may change
    from call to call: the passes follow tensors."""
    for node in traced.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default):
        (tensor,) = node.args
        for user in [*node.users] if tensor.meta["val"].is_floating_point() else ():
            if user.target not in _ARITHMETIC or user.args[1] is not node:
                continue
            other = user.args[0].meta["val"]
            if other.is_floating_point() and other.dim() > 0:  # it keeps its dtype beside a tensor without dimensions
                user.args = (user.args[0], tensor)


def _make_copies_differentiable(traced: fx.GraphModule) -> None:
    """Replace `aten.copy`, which has no derivative, where it copies a whole tensor, or to sizes that are known."""
    for node in traced.graph.find_nodes(op="call_function", target=aten.copy.default):
        into, source = (argument.meta["val"] for argument in node.all_input_nodes[:2])
        sizes = zip(into.shape, source.shape, strict=False)
        if into.dim() != source.dim() or not all(statically_known_true(a == b) for a, b in sizes):
            if not all(isinstance(size, int) for size in into.shape):
                continue
            with traced.graph.inserting_before(node):
                expanded = traced.graph.call_function(aten.expand.default, (node.args[1], [*into.shape]))
            expanded.meta = {**node.meta, "val": source.expand(into.shape)}
            node.args = node.args[0], expanded
        node.args = node.args[1:2]
        if into.dtype == source.dtype:
            node.target = aten.clone.default
        else:
            node.target, node.kwargs = aten._to_copy.default, {"dtype": into.dtype}
    traced.recompile()


def _refuse_shared_memory(examples: Sequence[Any], written: Sequence[bool]) -> None:
    """Raise NotCaptured if an input to which the graph writes shares memory with another input."""
    storages = [value.untyped_storage()._cdata if isinstance(value, Tensor) else None for value in examples]
    if any(storages.count(storage) > 1 for storage, wrote in zip(storages, written, strict=True) if wrote):
        raise NotCaptured("expected no writes to inputs that share memory with other inputs, found one")


def _origins(
    traced: fx.GraphModule, returned: Sequence[fx.Node], inputs: Sequence[fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """Map nodes of `traced`, which returns the values of the Dynamo nodes `returned`, to Dynamo nodes."""
    (values,) = traced.graph.output_node().args
    assert isinstance(values, list | tuple)
    origins: dict[fx.Node, list[fx.Node]] = {}
    for node, dynamo in zip(values, returned, strict=True):
        if isinstance(node, fx.Node):
            origins.setdefault(node, []).append(dynamo)
    for placeholder, dynamo in zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(dynamo.meta[EXAMPLE], torch.SymInt):
            origins.setdefault(placeholder, []).append(dynamo)
    return origins


def _return(traced: fx.GraphModule, dynamo: fx.Graph, origins: dict[fx.Node, list[fx.Node]]) -> None:
    """Let the ATen graph return only what the Dynamo graph returns, as the passes count an output as a reader."""
    wanted = set(dynamo.output_node().all_input_nodes)
    traced.graph.output_node().args = ([node for node, own in origins.items() if wanted.intersection(own)],)
    traced.recompile()


def _is_given(node: fx.Node) -> bool:
    """Whether the value of a node is an input of the ATen graph."""
    if node.op in ("placeholder", "call_module"):
        return True
    if node.op == "get_attr":
        return isinstance(node.meta.get(EXAMPLE), Tensor)
    if node.op not in ("call_function", "call_method") or EXAMPLE not in node.meta:
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        if node.target.name().startswith(_WRITING):
            raise NotCaptured(f"expected no kernel that writes to its inputs, found {node.target.name()}")
        return True
    return not _unbacked(node) <= set[Any]().union(*(_unbacked(operand) for operand in node.all_input_nodes))


def _unbacked(node: fx.Node) -> set[Any]:
    leaves = pytree.tree_leaves(node.meta.get(EXAMPLE))
    return set[Any]().union(*(free_unbacked_symbols(v) for v in leaves if isinstance(v, Tensor | torch.SymInt)))


def _leaves(node: fx.Node) -> list[Any]:
    if EXAMPLE not in node.meta:
        raise NotCaptured(f"expected a fake value for every input, found none for {node.name}")
    return list(pytree.tree_leaves(node.meta[EXAMPLE]))


def _raised_here(error: Exception) -> bool:
    """Whether it is a failure of this module, and not of an operation that cannot be traced so."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_filename == __file__


class _Interpreter(fx.Interpreter):
    """Run a Dynamo graph, and record the values of its nodes.

    Gradients stay off even where the graph enables them; `gradients` reads these settings from the graph. Where they
    end, tensors are detached once more, so that the ATen graph shows it.
    """

    def __init__(
        self, module: fx.GraphModule, given: dict[str, list[Any]], ends: Ends, tokens: dict[Any, Tensor]
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.given, self.ends, self.tokens = given, ends, tokens
        self.detached: list[tuple[str, Any]] = []
        """What readers with gradients are given in place of values computed without, by the names of those."""
        self.values: dict[str, Any] = {}
        self.autocast: dict[str, tuple[str, ...]] = {}
        self.writes: dict[str, list[str]] = {}
        """For nodes that write to memory, the operands to whose memory they write."""
        self.effects: list[str] = []
        """Nodes with effects: each takes the token of its kind of effect, and leaves another."""

    def run_node(self, n: fx.Node) -> Any:
        self.autocast[n.name] = tuple(device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device))
        if n.name in self.given:
            value = pytree.tree_unflatten(self.given[n.name], pytree.tree_structure(n.meta[EXAMPLE]))
        elif n.target is torch._C._set_grad_enabled or n.op == "output":
            value = None
        else:
            self._detach_operands(n)
            before = {operand.name: self._count_writes(operand) for operand in n.all_input_nodes}
            tokens = dict(self.tokens)
            value = super().run_node(n)
            if any(token is not tokens[effect] for effect, token in self.tokens.items()):
                self.effects.append(n.name)
            if n.name in self.ends.here and n.target != "detach":
                value = _detached(value)
            written = [own.name for own in n.all_input_nodes if self._count_writes(own) != before[own.name]]
            if written:
                self.writes[n.name] = written
        self.values[n.name] = value
        return value

    def _detach_operands(self, n: fx.Node) -> None:
        """Detach what the node reads and was computed where gradients are off."""
        for operand in n.all_input_nodes if n.name not in self.ends.silent else ():
            if operand.name in self.ends.lost and operand.name not in dict(self.detached):
                self.env[operand] = _detached(self.env[operand])
                self.detached.append((operand.name, self.env[operand]))

    def without_gradients(self) -> list[Tensor]:
        """All tensors in which gradients end."""
        values = [self.values[name] for name in self.ends.here if name in self.values]
        leaves = pytree.tree_leaves([*values, *(value for _, value in self.detached)])
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _count_writes(self, node: fx.Node) -> int:
        """How often the memory of a node's tensors has been written to."""
        tensors = [leaf for leaf in pytree.tree_leaves(self.values[node.name]) if isinstance(leaf, FunctionalTensor)]
        return sum(torch._functionalize_mutation_counter(tensor.elem) for tensor in tensors)


def _detached(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.detach, value)
