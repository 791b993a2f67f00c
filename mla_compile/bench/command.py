"""The `bench` subcommand."""

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_compile.bench.flags import GENERATION, KERNELS, KINDS, LAYER, PEERS, QUICK_KERNELS, TRAINING
from mla_compile.bench.generation.caches import CACHES
from mla_compile.bench.generation.models import MODELS
from mla_compile.bench.layers import LAYERS
from mla_compile.bench.modes import MODES
from mla_compile.optional_packages import require
from mla_compile.parsing import figure, file, positive

if TYPE_CHECKING:
    from mla_compile.bench.kernel_cases import Case
    from mla_compile.bench.workloads import Workload
    from mla_compile.cost import Device

ALONE = ("mla-gluon", "mla-clusters")
"""Those of our own peers that run only if they are named."""
THREADS_PER_CORE = 16
"""The most threads that are taken. More than one for each core are no faster; tens of thousands end the process."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the subcommand; parsed arguments carry `run` and `parser`."""
    parser = subparsers.add_parser(
        "bench",
        help="time an MLA layer or a whole model of transformers, or the GPU kernels, against the machine's limit",
        description="Time the unmodified attention layer of transformers on the CPU, in several modes whose calls "
        "alternate; with --model, `generate` of a whole model; with --device cuda, the attention kernels alone, in "
        "bf16 and FP8. A time is reported only for outputs that agree with float64.",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="cpu (default) or cuda")
    parser.add_argument("--layer", choices=LAYERS, help="dims and code of that model (default: v2-lite)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="dtype of weights, cache and hidden states on the CPU (default: float32)",
    )
    parser.add_argument(
        "--contexts",
        type=positive,
        nargs="*",
        metavar="TOKENS",
        help="time decoding with this many tokens in the cache (default: 1024 4096 16384 32768; "
        "with --model from 4096 on; on a GPU 1024 8192 32768 131072)",
    )
    parser.add_argument(
        "--prefill",
        type=positive,
        nargs="*",
        metavar="TOKENS",
        help="time the prefill of prompts of this many tokens (default: 1024 4096; with --model 1024 8192; "
        "on a GPU also 16384)",
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--cache", choices=["dynamic", "static"], help="the cache of a layer (default: dynamic)")
    parser.add_argument("--repeats", type=positive, help="timed calls of each mode (default: 10)")
    parser.add_argument("--threads", type=_threads, help="number of CPU threads (default: torch's)")
    parser.add_argument(
        "--train",
        type=positive,
        nargs="*",
        metavar="TOKENS",
        help="instead, time training: forward and backward of sequences of this many tokens (default: 1024 4096), "
        "compared with stock Inductor, with and without activation checkpointing",
    )
    parser.add_argument(
        "--batches",
        type=positive,
        nargs="+",
        metavar="B",
        help="number of sequences at once, with --model (default: 1) or on a GPU (default: 1 16 64 256)",
    )
    parser.add_argument(
        "--csv",
        type=file,
        metavar="FILE",
        help="write a row for each mode and workload; on a GPU, as soon as it is measured",
    )
    parser.add_argument(
        "--json", type=file, metavar="FILE", help="write everything that was measured; on a GPU, as soon as it is"
    )
    parser.add_argument(
        "--plot",
        type=figure,
        metavar="FILE",
        help="draw time against length; on a GPU, the share of the limit that is reached (png, svg, pdf)",
    )
    _describe_generation(parser.add_argument_group("with --model: modes are combined with caches"))
    _describe_kernels(parser.add_argument_group("with --device cuda"))
    parser.set_defaults(run=run, parser=parser)


def _threads(text: str) -> int:
    number, cores = positive(text), os.cpu_count() or 1
    if number > cores * THREADS_PER_CORE:
        raise argparse.ArgumentTypeError(
            f"expected at most {cores * THREADS_PER_CORE} threads on {cores} cores, found {text}"
        )
    return number


def _describe_generation(model: Any) -> None:
    model.add_argument(
        "--model", choices=MODELS, help="instead, measure the tokens per second of a whole model with random weights"
    )
    model.add_argument(
        "--layers",
        type=positive,
        help="layers of that model, whose vocabulary is reduced in proportion (default: 4)",
    )
    model.add_argument("--caches", nargs="+", choices=CACHES, metavar="CACHE", help=", ".join(CACHES))
    model.add_argument(
        "--vllm",
        action="store_true",
        default=None,
        help="measure vLLM's engine too, if installed: with its own attention for CPUs, and with this package's",
    )


def _describe_kernels(gpu: Any) -> None:
    gpu.add_argument("--kernels", nargs="+", choices=KINDS, metavar="KERNEL", help=", ".join(KINDS))
    gpu.add_argument("--heads", type=positive, nargs="+", metavar="N", help="(default: 16 128)")
    gpu.add_argument("--queries", type=positive, nargs="+", metavar="SQ", help="of decode (default: 1 2 4)")
    gpu.add_argument("--dtypes", nargs="+", choices=["bf16", "fp8"], metavar="DTYPE", help="bf16, fp8")
    gpu.add_argument("--peers", nargs="+", choices=[*PEERS, *ALONE], metavar="PEER", help=", ".join(PEERS))
    gpu.add_argument(
        "--quick",
        action="store_true",
        default=None,
        help="only those of 13 selected cases that have these kernels, heads, queries and dtypes",
    )
    gpu.add_argument(
        "--workspace-tokens",
        type=positive,
        metavar="N",
        help="workspace_tokens of this project's prefill and train (default: 1024)",
    )
    gpu.add_argument(
        "--max-autotune",
        action="store_true",
        default=None,
        help="time several tile sizes of this project's kernels and take the fastest",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the files, print the table. Returns 1 if a mode gave a wrong output or failed, else 0."""
    if arguments.device == "cuda":
        return _run_kernels((QUICK_KERNELS if arguments.quick else KERNELS).of(arguments))
    if arguments.model is not None:
        return _run_generation(GENERATION.of(arguments))
    if arguments.train is not None:
        return _run_training(TRAINING.of(arguments))
    return _run_layer(LAYER.of(arguments))


def _run_layer(arguments: argparse.Namespace) -> int:
    """As `run`, for one layer on the CPU."""
    from mla_compile.bench import run as benchmark_run
    from mla_compile.bench import table
    from mla_compile.bench.plot import plot

    workloads = _workloads(arguments)
    if not workloads:
        arguments.parser.error("expected at least one of --contexts and --prefill with a number of tokens")
    _prepare(arguments)
    benchmark = benchmark_run.run(
        replace(LAYERS[arguments.layer], dtype=arguments.dtype),
        workloads,
        arguments.modes,
        arguments.cache,
        arguments.repeats,
    )
    return _written(arguments, benchmark, table, plot)


def _workloads(arguments: argparse.Namespace) -> "list[Workload]":
    from mla_compile.bench.workloads import Workload

    return [Workload("decode", n) for n in arguments.contexts] + [Workload("prefill", n) for n in arguments.prefill]


def _prepare(arguments: argparse.Namespace) -> None:
    import torch

    if arguments.plot:
        require("matplotlib.figure", "plot", "--plot")  # fail before minutes of measuring
    if arguments.threads:
        torch.set_num_threads(arguments.threads)


def _written(arguments: argparse.Namespace, measured: Any, table: Any, plot: Callable[[Any, Path], object]) -> int:
    """Print the table and write the files, by a module `table` and a function `plot`; return what `run` returns."""
    print(table.as_text(measured))
    if arguments.csv:
        arguments.csv.write_text(table.as_csv(measured))
    if arguments.json:
        arguments.json.write_text(table.as_json(measured))
    if arguments.plot:
        plot(measured, arguments.plot)
    return _status(measured.results)


def _status(results: Sequence[Any]) -> int:
    return int(any(result.status in ("wrong", "failed") for result in results))


def _run_generation(arguments: argparse.Namespace) -> int:
    """As `run`, for `generate` of a whole model."""
    from mla_compile.bench.generation import table
    from mla_compile.bench.generation.plot import plot
    from mla_compile.bench.generation.run import run as run_ways
    from mla_compile.bench.generation.ways import ENGINES, WAYS, Batch

    batches = [Batch(size, workload) for size in arguments.batches for workload in _workloads(arguments)]
    ways = [way for way in WAYS if way.compiler in arguments.modes and way.cache in arguments.caches]
    ways += ENGINES if arguments.vllm else ()
    if not batches or not ways:
        arguments.parser.error("--model: expected a workload, and a mode other than by-hand with a cache that it takes")
    _prepare(arguments)
    whole = MODELS[arguments.model].cut_to(arguments.layers)
    whole = replace(whole, layer=replace(whole.layer, dtype=arguments.dtype))
    return _written(arguments, run_ways(whole, batches, ways, arguments.repeats), table, plot)


def _run_training(arguments: argparse.Namespace) -> int:
    """As `run`, for forward and backward."""
    import torch

    from mla_compile.bench import training

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    layer = replace(LAYERS[arguments.layer], dtype=arguments.dtype)
    results = training.measure(layer, arguments.train or [1024, 4096], list(training.MODES), arguments.repeats)
    print(training.as_text(layer, results))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return int(not all(result.right or result.skipped for result in results))


def _run_kernels(arguments: argparse.Namespace) -> int:
    """As `run`, for the attention kernels on a GPU."""
    import torch

    if not torch.cuda.is_available():
        arguments.parser.error(f"--device cuda: expected a GPU that torch sees, found none (torch {torch.__version__})")
    if arguments.plot:
        require("matplotlib.figure", "plot", "--plot")  # fail before minutes of measuring
    from mla_compile.bench import kernel_run
    from mla_compile.bench.plot import plot_kernels
    from mla_compile.kernels._common.tuning import tuning

    cases = [replace(case, workspace_tokens=arguments.workspace_tokens) for case in _cases(arguments)]

    def write(limits: "Device", results: list[kernel_run.Result]) -> None:
        if arguments.csv and results:  # written as results come, in case the run is cut short
            arguments.csv.write_text(kernel_run.as_csv(limits, results))
        if arguments.json:
            arguments.json.write_text(kernel_run.as_json(limits, results))

    with tuning() if arguments.max_autotune else contextlib.nullcontext():
        limits, results = kernel_run.run(
            cases,
            arguments.peers,
            torch.device(arguments.device),
            progress=write,
        )
    print(kernel_run.as_text(limits, results))
    if arguments.plot:
        plot_kernels(limits, results, arguments.plot)
    return _status(results)


def _cases(arguments: argparse.Namespace) -> "Iterable[Case]":
    """The cases that are asked for: of the selected ones with --quick, else all combinations."""
    from mla_compile.bench import kernel_run

    if not arguments.quick:
        return kernel_run.grid(
            arguments.kernels,
            arguments.batches,
            arguments.contexts,
            arguments.prefill,
            arguments.heads,
            arguments.queries,
            [name == "fp8" for name in arguments.dtypes],
        )
    return [
        case
        for case in kernel_run.QUICK
        if case.kind in arguments.kernels
        and case.N in arguments.heads
        and (case.of_prompts or case.Sq in arguments.queries)
        and ("fp8" if case.fp8 else "bf16") in arguments.dtypes
    ]
