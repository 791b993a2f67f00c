"""Rewrite and lower the programs that `torch.export` makes, for AOTInductor and other runtimes.

torch.export.export -> rewrite: seal, functional ATen, passes -> a program of mla ops
                    -> lower: mla ops to ATen operations      -> a program that runs without this library
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

from mla_compile.asked import OURS
from mla_compile.kernels.decompositions import decompositions
from mla_compile.passes.paths.all import AUTO

from .device import rates_of
from .dynamo.seal import seal_exported, unseal_exported
from .errors import OptionError
from .inductor.gpu_launches import put_launches
from .inductor.loop_operands import straighten_loop_operands
from .inductor.loop_splits import split_loops_evenly
from .inductor.written_buffers import read_written_buffers
from .options import OFF, parse
from .program_guards import broken_guards
from .report import Report, record
from .rewriting import failures_told, raise_strict, rewrite_graph
from .verify import check

NOTE = "exported program"
_ASSERTIONS = {torch.ops.aten._assert_tensor_metadata.default: lambda *_, **__: None}
"""Assertions that `torch.export` adds at every `.to(dtype)`, to be dropped. They always hold, since a program's dtypes
follow from its inputs and weights, and the passes would take each for a second reader of the tensor that is cast."""


def rewrite(program: ExportedProgram, *, options: Mapping[str, Any] | None = None) -> ExportedProgram:
    """Rewrite the MLA attention of an exported program; everything else stays as it is.

    The result is a new functional program of ATen and mla ops with the same inputs, outputs, weights and dynamic
    shapes. It is correct for all sizes in its ranges and needs no guards: where the faster path depends on the sizes,
    the graph has both paths, and `torch.cond` takes one by this machine's cost model at the sizes of the run. The
    result runs where `mla_compile` is imported; `lower` makes it run anywhere.

    `options` are the `mla.*` options of the backend. `mla.verify` runs the program's example inputs. `last_report()`
    says what became of each attention.

    Raises:
        TypeError: if this is no exported program.
        OptionError: for an option that is not one of ours.
        StrictError: with `mla.strict`, if an attention stays unchanged or there is none.
        VerifyError: with `mla.verify`, if a rewritten site differs from the original.
    """
    _expect_program(program)
    ours, others = parse(options, None)
    if others:
        raise OptionError(f"expected options that start with 'mla.', found {min(others)!r}: give it to AOTInductor")
    if ours.kernels != AUTO:
        raise OptionError(f"mla.kernels: expected {AUTO} for an exported program, which keeps no run-time options")
    if ours.path == OFF:
        record(Report((), f"{NOTE}, mla.path is off"))
        return program
    start = time.perf_counter()
    functional = _decomposed(program, _composite() | _ASSERTIONS, seal_exported)
    module = functional.graph_module
    seconds = {"retrace": time.perf_counter() - start}
    tensors = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    with failures_told():
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
    """Replace the mla ops of a rewritten program with ATen operations, so that it runs without this library.

    `torch._inductor.aoti_compile_and_package` needs such a program, as its packages run without Python. Dynamic shapes
    stay dynamic. The chunked path becomes a `torch.while_loop` with the workspace that the path prescribes.

    With `kernels`, the ops that have C++ kernels stay: absorbed attention, all other attention without a mask tensor,
    and products with a matrix per head, on CPU, in float32, bfloat16 or float16. The result runs where a library
    written by `build_library` is loaded.

    Compile it in a process that called this function: from then on, Inductor's code for a CPU has the last elements of
    loops that it splits, which torch 2.11 to 2.15 leave out, and a package reads a buffer of one element that it
    writes to, which they take for a constant.

    If there is a GPU, attention of known sizes on it becomes launches of its Triton kernels, planned for that GPU, and
    a package contains these kernels compiled.

    Warns where the program holds for fewer sizes than its ranges allow, as a package does not check that.

    Raises:
        TypeError: if this is no exported program.
    """
    _expect_program(program)
    _tell_of_guards(program)
    split_loops_evenly()
    read_written_buffers()

    def launch(graph: fx.Graph) -> None:
        if torch.cuda.is_available():
            put_launches(graph, OURS, guards=False)

    lowered = _decomposed(program, _composite() | decompositions(kernels), launch)
    straighten_loop_operands(lowered.graph_module)
    return lowered


def _expect_program(program: object) -> None:
    if not isinstance(program, ExportedProgram):
        raise TypeError(f"expected a program of torch.export.export, found {type(program).__name__}")


def _tell_of_guards(program: ExportedProgram) -> None:
    broken = broken_guards(program)
    if broken:
        warnings.warn(
            f"the program holds only where {' and '.join(broken)}, which is not so for all sizes in its ranges: a "
            "package does not check it, and is wrong elsewhere",
            stacklevel=3,
        )


def _decomposed(
    program: ExportedProgram, table: dict[Any, Callable[..., Any]], prepare: Callable[[fx.Graph], None] | None = None
) -> ExportedProgram:
    """A copy of the program with its graph prepared by `prepare` and its ops decomposed by `table`."""
    with warnings.catch_warnings():
        # torch 2.13 warns about the way in which it copies its own tree specs.
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
    """Decompositions of all ops that ATen defines by other ops (linear, matmul, ...), except attention.

    They leave the ops that AOTAutograd hands to the passes when it is given no decomposition table.
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
    """Update the output names in the signature: an attention that was replaced may have been an output."""
    (returned,) = graph.output_node().args
    assert isinstance(returned, list | tuple)
    for spec, node in zip(signature.output_specs, returned, strict=True):
        if isinstance(node, fx.Node):
            spec.arg.name = node.name
