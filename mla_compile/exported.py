"""Exported programs: the passes over what `torch.export` made, for AOTInductor and whatever else runs such programs.

torch.export.export -> rewrite: seal, functional ATen, passes -> a program of mla ops
                    -> lower: mla ops as ATen operations      -> a program that runs without this library
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from mla_compile.kernels.decompositions import decompositions
from mla_compile.kernels.implementations.implementation import OURS
from mla_compile.passes.paths.all import AUTO

from .device import rates_of
from .errors import OptionError
from .gpu_launches import put_launches
from .loop_operands import straighten_loop_operands
from .options import OFF, parse
from .report import Report, record
from .rewriting import raise_strict, rewrite_graph
from .seal import seal_exported, unseal_exported
from .verify import check

NOTE = "exported program"
_ASSERTIONS = {torch.ops.aten._assert_tensor_metadata.default: lambda *_, **__: None}
"""What `torch.export` adds at every `.to(dtype)`. The dtypes of a program are those of its inputs and weights, so it
always holds; but to the passes it would be a second reader of what is cast."""


def rewrite(program: ExportedProgram, *, options: Mapping[str, Any] | None = None) -> ExportedProgram:
    """Rewrite the MLA attention of an exported program; everything else stays what it is.

    The result is a new functional program of ATen and mla ops with the same inputs, outputs, weights and dynamic
    shapes, right for all sizes of its ranges: it needs no guards. Where the faster path is not the same for all of
    them, the graph has both and `torch.cond` takes one, by the cost model of this machine at the sizes of the run. The
    result runs where `mla_compile` is imported; `lower` makes it run anywhere.

    `options` are the `mla.*` ones of the backend. `mla.verify` runs the program's example inputs. What became of each
    attention is in `last_report()`.

    Raises:
        OptionError: for an option that is not one of ours.
        StrictError: with `mla.strict`, if an attention stays unchanged or there is none.
        VerifyError: with `mla.verify`, if a rewritten site differs from the original.
    """
    ours, others = parse(options, None)
    if others:
        raise OptionError(f"expected options that start with 'mla.', found {min(others)!r}: give it to AOTInductor")
    if ours.kernels != AUTO:
        raise OptionError(f"mla.kernels: expected {AUTO} for an exported program, which keeps no options of a run")
    if ours.path == OFF:
        record(Report((), f"{NOTE}, mla.path is off"))
        return program
    start = time.perf_counter()
    functional = _decomposed(program, _composite() | _ASSERTIONS, seal_exported)
    module = functional.graph_module
    seconds = {"retrace": time.perf_counter() - start}
    tensors = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    rewriting = rewrite_graph(module, ours.device or rates_of(tensors), ours, functional.range_constraints)
    outcomes, original = rewriting.outcomes, rewriting.original
    record(Report(outcomes, NOTE, seconds | {"passes": rewriting.seconds}))
    if ours.strict:
        raise_strict(outcomes, NOTE)
    if original is not None:
        check(original, module, outcomes, functional._graph_module_flat_inputs(*_example(program)))
    unseal_exported(module.graph)
    module.recompile()
    _name_outputs(functional.graph, functional.graph_signature)
    functional.validate()
    return functional


def lower(program: ExportedProgram, *, kernels: bool = False) -> ExportedProgram:
    """A rewritten program with ATen operations in the place of mla ops: one that runs without this library.

    That is what `torch._inductor.aoti_compile_and_package` wants, whose packages run without Python. Dynamic shapes
    stay; the chunked path is a `torch.while_loop`, whose workspace is what the path says.

    With `kernels` the ops stay that C++ takes: attention without a mask tensor on CPU, in float32, bfloat16 or float16,
    and products of a matrix a head. The result runs where what `build_library` wrote is loaded.

    With a GPU, attention of known sizes on it becomes the launches of its Triton kernels, planned for that GPU, which
    are compiled into a package.
    """

    def launch(graph: fx.Graph) -> None:
        if torch.cuda.is_available():
            put_launches(graph, OURS)

    lowered = _decomposed(program, _composite() | decompositions(kernels), launch)
    straighten_loop_operands(lowered.graph_module)
    return lowered


def _decomposed(
    program: ExportedProgram, table: dict[Any, Callable[..., Any]], prepare: Callable[[fx.Graph], None] | None = None
) -> ExportedProgram:
    """The program with ops decomposed, its graph prepared before; the given one stays as it is."""
    with warnings.catch_warnings():
        # torch 2.13 copies its tree specs in a way that it warns of.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        if prepare is not None:
            module = fx.GraphModule(program.graph_module, copy.deepcopy(program.graph))
            module.meta = dict(program.graph_module.meta)
            prepare(module.graph)
            module.recompile()
            signature = copy.deepcopy(program.graph_signature)
            _name_outputs(module.graph, signature)
            program = program._update(module, signature)
        return program.run_decompositions(table)


def _composite() -> dict[Any, Callable[..., Any]]:
    """Decompositions of what ATen defines by other operations (linear, matmul, ...): all but attention, and no others.

    What is left is what AOTAutograd hands to the passes without a decomposition table.
    """
    key = "CompositeImplicitAutograd"
    table = {
        op: decomposition
        for op, decomposition in torch.export.default_decompositions().items()
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)
    }
    del table[torch.ops.aten.scaled_dot_product_attention.default]
    return table


def _example(program: ExportedProgram) -> tuple[Any, Any]:
    if program.example_inputs is None:
        raise OptionError("mla.verify: expected a program with example inputs, found one without")
    return program.example_inputs


def _name_outputs(graph: fx.Graph, signature: ExportGraphSignature) -> None:
    """Let the signature name the nodes that are outputs now: an attention may have been one."""
    (returned,) = graph.output_node().args
    assert isinstance(returned, list | tuple)
    for spec, node in zip(signature.output_specs, returned, strict=True):
        if isinstance(node, fx.Node):
            spec.arg.name = node.name
