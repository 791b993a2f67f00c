"""`mla-compile bench --train`: time and memory of a layer's forward and backward, compared with stock Inductor.

Gradients are those of the weights and of the hidden states. They are checked against float64 at 512 tokens. The modes
are timed in turn. Memory is measured in a separate process for each mode; see `memory.peak_growth`.
"""

import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from mla_compile.bench.check import HALF_FACTOR, ROUNDING_FACTOR, distance, too_far
from mla_compile.bench.layers import Built, Layer, build
from mla_compile.bench.memory import answered, kept_for_backward, needed_to_train, peak_growth, too_much
from mla_compile.bench.modes import summary
from mla_compile.bench.progress import log
from mla_compile.bench.workloads import Workload, make_inputs
from mla_compile.text_table import aligned

MODES = {
    "inductor": "transformers under torch.compile",
    "checkpointed": "the same, with activations recomputed in the backward",
    "mla": 'transformers under torch.compile(backend="mla")',
}
CHECKED_TOKENS = 512
LEGEND = """\
ms       median wall time of forward and backward, compiled and warm, calls of the modes alternating
peak     growth of resident memory during one forward and backward, in a process of its own, gradients included
saved    bytes per token that the forward keeps for the backward, besides its inputs and the weights
error    largest distance from float64 of a gradient at 512 tokens, relative to its largest element"""


@dataclass(frozen=True)
class TrainingResult:
    """One mode at one number of tokens."""

    mode: str
    tokens: int
    seconds: tuple[float, ...]
    """The wall time of each forward and backward."""
    error: float
    allowed: float
    """The error that rounding explains."""
    peak_bytes: int | None
    saved_bytes: int | None
    """This and `peak_bytes` are None if they were not measured."""
    note: str
    """Why there are no numbers; empty if there are."""
    skipped: bool = False
    """Whether it was skipped because it does not fit into memory."""

    @property
    def right(self) -> bool:
        """Whether there are gradients, and they are correct."""
        return not self.note and self.error <= self.allowed


Step = Callable[[dict[str, Any]], Tensor]


def _step(mode: str, built: Built) -> Step:
    """A compiled function of the attention's keyword arguments that returns its output."""

    def plain(arguments: dict[str, Any]) -> Tensor:
        output: Tensor = built.attention(**arguments)[0]
        return output

    def again(arguments: dict[str, Any]) -> Tensor:
        output: Tensor = checkpoint(plain, arguments, use_reentrant=False)
        return output

    torch.compiler.reset()
    function = again if mode == "checkpointed" else plain
    compiled: Step = torch.compile(function, backend="mla" if mode == "mla" else "inductor", dynamic=False)
    return compiled


def _arguments(built: Built, tokens: int, dtype: torch.dtype | None = None) -> dict[str, Any]:
    inputs = make_inputs(built, Workload("prefill", tokens), "dynamic", dtype)
    arguments = inputs.arguments() | {inputs.cache_argument: None}
    arguments["hidden_states"] = arguments["hidden_states"].requires_grad_()
    return arguments


def _gradients(step: Step, built: Built, arguments: dict[str, Any]) -> list[Tensor]:
    """The gradients of the hidden states and the weights, for the sum of the output times a fixed tensor."""
    output = step(arguments)
    direction = torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(2))
    direction = direction.to(built.layer.torch_dtype).to(output.dtype)
    leaves = [arguments["hidden_states"], *built.attention.parameters()]
    return list(torch.autograd.grad(output @ direction, leaves, torch.ones_like(output[..., 0])))


def _trainable(layer: Layer) -> Built:
    built = build(layer)
    built.attention.requires_grad_(True)
    return built


def _exact_gradients(built: Built) -> list[Tensor]:
    """The gradients of transformers' own module in float64."""
    exact = Built(built.layer, built.config, copy.deepcopy(built.attention).double(), built.rotary)
    checked = _arguments(exact, CHECKED_TOKENS, torch.float64)
    return _gradients(lambda arguments: exact.attention(**arguments)[0], exact, checked)


def _allowed(built: Built, exact: Sequence[Tensor]) -> float:
    """The relative error that rounding explains, as in `check.tolerance`."""
    layer, dtype = built.layer, built.layer.torch_dtype
    if dtype.itemsize < 4:
        plain = _gradients(lambda arguments: built.attention(**arguments)[0], built, _arguments(built, CHECKED_TOKENS))
        return HALF_FACTOR * max(torch.finfo(dtype).eps, *map(distance, plain, exact))
    terms = max(layer.hidden, layer.N * layer.V, layer.L, CHECKED_TOKENS)
    return float(ROUNDING_FACTOR * terms**0.5 * 2.0**-24)


def measure(layer: Layer, lengths: Sequence[int], modes: Sequence[str], repeats: int) -> list[TrainingResult]:
    """A result for each mode at each number of tokens. Progress goes to standard error."""
    built = _trainable(layer)
    exact = _exact_gradients(built)
    allowed = _allowed(built, exact)
    results = []
    for tokens in lengths:
        steps: dict[str, Step] = {}
        errors, seconds, notes = dict[str, float](), dict[str, list[float]](), dict[str, str]()
        skipped = {mode: why for mode in modes if (why := too_much(needed_to_train(layer, mode, tokens)))}
        for mode in (mode for mode in modes if mode not in skipped):
            log(f"{mode} at {tokens} tokens")
            try:
                found = _gradients(_step(mode, built), built, _arguments(built, CHECKED_TOKENS))
                errors[mode] = max(distance(a, b) for a, b in zip(found, exact, strict=True))
                steps[mode], seconds[mode] = _step(mode, built), []
                _gradients(steps[mode], built, _arguments(built, tokens))
            except Exception as failure:  # any error of a compiler is a result of the benchmark
                steps.pop(mode, None)
                notes[mode] = summary(failure)
        gc.collect()
        for _ in range(repeats):
            for mode, step in steps.items():
                arguments = _arguments(built, tokens)
                start = time.perf_counter()
                _gradients(step, built, arguments)
                seconds[mode].append(time.perf_counter() - start)
        for mode in modes:
            peak, saved = _memory(layer, mode, tokens) if mode in steps else (None, None)
            taken, error = tuple(seconds.get(mode, ())), errors.get(mode, float("inf"))
            note = notes.get(mode) or skipped.get(mode, "")
            results.append(TrainingResult(mode, tokens, taken, error, allowed, peak, saved, note, mode in skipped))
    return results


def _memory(layer: Layer, mode: str, tokens: int) -> tuple[int | None, int | None]:
    """Peak and saved bytes, measured in a separate process. If it fails, the reason goes to standard error."""
    task = {"layer": asdict(layer), "mode": mode, "tokens": tokens}
    done = answered("mla_compile.bench.training", task, torch.get_num_threads())
    if done.returncode:
        log(f"memory of {mode}: {done.stderr.strip().splitlines()[-1:]}")
        return None, None
    peak, saved = json.loads(done.stdout)
    return peak, saved


def _child() -> None:
    """Answer the task on standard input with peak and saved bytes."""
    task = json.load(sys.stdin)
    built = _trainable(Layer(**task["layer"]))
    step = _step(task["mode"], built)
    _gradients(step, built, _arguments(built, task["tokens"]))
    arguments = _arguments(built, task["tokens"])
    peak = peak_growth(lambda: _gradients(step, built, arguments))
    given = [value for value in pytree.tree_leaves(arguments) if isinstance(value, Tensor)]
    saved = kept_for_backward(lambda: step(arguments), (*given, *built.attention.parameters()))
    print(json.dumps([peak, saved]))


def as_text(layer: Layer, results: Sequence[TrainingResult]) -> str:
    """The results as a table."""
    stock = {r.tokens: r for r in results if r.mode == "inductor"}
    header = ("tokens", "mode", "ms", "speed-up", "peak MiB", "of stock", "saved B/token", "error")
    rows = [header]
    for result in results:
        base = stock.get(result.tokens)
        if not result.right:
            note = result.note or too_far(result.error, result.allowed)
            rows.append((str(result.tokens), result.mode, "-", "-", "-", "-", "-", note))
            continue
        median = statistics.median(result.seconds)
        speed = f"{statistics.median(base.seconds) / median:.2f}" if base is not None and base.seconds else "-"
        share = "-"
        if base is not None and base.peak_bytes and result.peak_bytes:
            share = f"{result.peak_bytes / base.peak_bytes:.2f}"
        peak = f"{result.peak_bytes / 2**20:.0f}" if result.peak_bytes else "-"
        saved = f"{result.saved_bytes / result.tokens:.0f}" if result.saved_bytes is not None else "-"
        cells = f"{1000 * median:.0f}", speed, peak, share, saved, f"{result.error:.1e}"
        rows.append((str(result.tokens), result.mode, *cells))
    modes = "\n".join(f"{mode:12} {words}" for mode, words in MODES.items())
    lines = aligned(rows, "><>")
    return "\n".join([f"training of one attention layer of {layer.name}, {layer.dtype}", *lines, "", modes, LEGEND])


if __name__ == "__main__":
    _child()
