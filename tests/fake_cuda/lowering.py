"""Read from the code that Inductor writes for a GPU what it would launch and allocate."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import sympy
import torch
import torch._inductor.graph
from functorch.compile import make_boxed_func
from torch import fx
from torch._inductor.cudagraph_utils import check_multiple_devices_or_any_cpu_nodes
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import mla_compile
from mla_compile.inductor import codegen
from mla_compile.kernels import (
    expanded_attention,
    latent_attention,
    paged_expanded_attention,
    paged_latent_attention,
)
from tests.kernels.recorded import recorded

OPS: dict[str, Callable[..., object]] = {
    "latent_attention": latent_attention.latent_attention_gpu,
    "paged_latent_attention": paged_latent_attention.paged_latent_attention_gpu,
    "expanded_attention": expanded_attention.expanded_attention_gpu,
    "paged_expanded_attention": paged_expanded_attention.paged_expanded_attention_gpu,
}
"""The CUDA implementations of ops that Inductor's code may call; everything else it compiles, so its code shows it."""
_BEGINS = re.compile(r"def (call|partition_\d+)\(")
"""Where the code that runs begins; what a CUDA graph records is in functions of their own."""
_CALLED = re.compile(r"\b(?:(\w+)\.run\(|extern_kernels\.(\w+)\(|torch\.ops\.((?:\w+\.)+\w+)\(|\w+\.(copy_)\()")
_OURS = re.compile(r"^((?:attend_latents|combine)_\d+) = async_compile\.triton\('\w+', \'{3}(.*?)^\'{3}", re.M | re.S)
_ALLOCATED = re.compile(r"= empty_strided_cuda\((\(.*?\)), \(.*?\), torch\.(\w+)\)")


@dataclass(frozen=True)
class Lowered:
    """Facts about a graph compiled for a GPU: only numbers and names, since they are passed on as JSON."""

    paths: list[str]
    """The path of each attention."""
    ops: list[str]
    """The mla ops in the rewritten graph, before launches took their places."""
    launches: list[str]
    """Kernels, library calls and copies, in order; what an mla op launches is prefixed with the op's name."""
    written: dict[str, str]
    """The source that Inductor wrote for each of this project's kernels that it launches, by Inductor's name for it."""
    buffers: list[int]
    """The bytes of each allocation of the graph and of its ops; symbolic sizes have the values of the trace."""
    host_calls: dict[str, int]
    """For each mla op, how many operations torch dispatches within one call, including views and allocations."""
    moving: list[str]
    """Inputs that are written to and whose addresses may change, because of which CUDA graphs would be skipped."""
    no_graphs: str
    """Any other reason for which CUDA graphs would be skipped."""
    kernels: list[str]
    """The lines of the report on which kernel would compute an op that other projects' packages can compute too."""


class _Written(BaseException):
    """Raised to leave Inductor once the code is written; not an `Exception`, which Inductor would wrap."""


def lower(call: Callable[[], object]) -> Lowered:
    """Facts about the first graph that a call compiles; the call ends where the graph would run."""
    compile_fx_inner, put_launches = codegen.compile_fx_inner, codegen.put_launches
    found: dict[str, Any] = {}

    def put(graph: fx.Graph, kernels: str, **named: Any) -> bool:
        found["ops"] = [node.target._schema.name.removeprefix("mla::") for node in _ops_of(graph)]
        return put_launches(graph, kernels, **named)

    def stop(graph: Any) -> None:
        code, _ = graph.codegen()
        raise _Written(getattr(code, "value", code), graph)

    def inner(module: fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        ops = list(_launched_by_ops(module))
        try:
            compile_fx_inner(module, inputs, **options)
        except _Written as written:
            code, graph = written.args
        found.update(_facts(code, ops, graph, options.get("static_input_idxs", ())))

        def run(*_: Any) -> None:
            raise _Written

        return make_boxed_func(run)

    with (
        mock.patch.object(codegen, "compile_fx_inner", inner),
        mock.patch.object(codegen, "put_launches", put),
        mock.patch.object(torch._inductor.graph.GraphLowering, "compile_to_module", stop),
        torch.no_grad(),
    ):
        try:
            call()
        except _Written:
            report = mla_compile.last_report()
            return Lowered([site.path for site in report.sites], kernels=list(report.kernels), **found)
    raise AssertionError("expected a graph with attention to rewrite, found none")


@dataclass(frozen=True)
class _Op:
    """One call of an mla op."""

    name: str
    launches: list[str]
    buffers: list[int]
    host_calls: int


class _Dispatched(TorchDispatchMode):
    """Records operations: their number, those that launch something, and the bytes that they allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.launches: list[str] = []
        self.buffers: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        name = func._schema.name.removeprefix("aten::")
        returned = [value.alias_info for value in func._schema.returns]
        if all(alias is None for alias in returned):
            self.buffers.append(result.numel() * result.itemsize)
        if "empty" not in name and not any(alias is not None and not alias.is_write for alias in returned):
            self.launches.append(name)
        return result


def _launched_by_ops(module: fx.GraphModule) -> Iterator[_Op]:
    """What each mla op of a graph launches, when it is called on tensors without values."""
    for node in _ops_of(module.graph):
        name = node.target._schema.name.removeprefix("mla::")
        if name not in OPS:
            continue
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with _disable_current_modes(), recorded() as kernels, _Dispatched() as dispatched:
            args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, _without_values, arguments)
            dispatched.count, dispatched.buffers[:] = 0, []
            OPS[name](*args, **kwargs)
        launches = dispatched.launches + [launch.kernel for launch in kernels]
        yield _Op(name, launches, dispatched.buffers, dispatched.count)


def _ops_of(graph: fx.Graph) -> Iterator[Any]:
    return (
        node for node in graph.nodes if node.op == "call_function" and getattr(node.target, "namespace", "") == "mla"
    )


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _facts(code: str, ops: list[_Op], graph: Any, static: Any) -> dict[str, Any]:
    by_name = collections.defaultdict(list)
    for op in ops:
        by_name[op.name].append(op)
    sizes = {str(symbol): value for symbol, value in graph.sizevars.shape_env.backed_var_to_val.items()}
    launches: list[str] = []
    buffers = [bytes for op in ops for bytes in op.buffers]
    for line in code[_BEGINS.search(code).start() :].splitlines():
        if (allocated := _ALLOCATED.search(line)) is not None:
            shape, dtype = sympy.sympify(allocated[1], locals=sizes), getattr(torch, allocated[2])
            buffers.append(int(math.prod(shape)) * dtype.itemsize)
        if (called := _CALLED.search(line.partition("#")[0])) is None:
            continue
        triton, library, op_name, copy = called.groups()
        if op_name is not None and op_name.startswith("mla."):
            op = by_name[op_name.split(".")[1]].pop(0)
            launches += [f"{op.name}: {launch}" for launch in op.launches]
        else:
            launches.append(triton or library or op_name or copy)
    assert not any(by_name.values()), "an op of the graph that the code does not call"
    names, moving = list(graph.graph_input_names), sorted(set(graph.mutated_input_idxs) - set(static))
    return {
        "launches": launches,
        "written": dict(_OURS.findall(code)),
        "buffers": buffers,
        "host_calls": {op.name: op.host_calls for op in ops},
        "moving": [names[i] for i in moving],
        "no_graphs": graph.disable_cudagraphs_reason
        or check_multiple_devices_or_any_cpu_nodes(dict(graph.device_node_mapping))
        or "",
    }
