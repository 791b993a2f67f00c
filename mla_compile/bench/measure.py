"""Time the modes of one workload, one call of each in turn."""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from mla_compile.bench import check
from mla_compile.bench.layers import Built
from mla_compile.bench.memory import needed_bytes, too_much
from mla_compile.bench.modes import Step, summary, warmed_up
from mla_compile.bench.workloads import CacheKind, Workload, make_inputs


@dataclass(frozen=True)
class Result:
    """One mode at one workload. It has times only if the output is right."""

    mode: str
    workload: Workload
    status: Literal["ok", "wrong", "skipped", "failed"]
    note: str = ""
    """Why there is no time; for the mode `mla`, what became of the attention."""
    seconds: tuple[float, ...] = ()
    """The wall time of each call."""
    error: float | None = None
    """The largest distance from float64 relative to the largest element; see `check.error`."""
    peak_bytes: int | None = None
    """See `memory.peak_growth`; None if it was not measured."""

    @property
    def median(self) -> float | None:
        """The median time in seconds."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """The first and third quartile in seconds."""
        if len(self.seconds) < 2:
            return None
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third


def measure(
    built: Built, workload: Workload, cache_kind: CacheKind, modes: Sequence[str], repeats: int
) -> list[Result]:
    """A result for each mode. Times exclude compilation, warm-up and the making of caches.

    The modes take turns, so that other load on the machine affects all of them. A recompilation during a timed call is
    an error.
    """
    torch.compiler.reset()
    exact = check.reference(built, workload, cache_kind)
    if exact is None:
        reason = "there is not enough memory to check the output against float64"
        return [Result(mode, workload, "skipped", reason) for mode in modes]
    steps: dict[str, Step] = {}
    results: dict[str, Result] = {}
    allowed = check.tolerance(built, workload, cache_kind, exact)
    for mode in modes:
        prepared = _prepare(built, workload, cache_kind, mode, exact, allowed)
        if isinstance(prepared, Result):
            results[mode] = prepared
        else:
            steps[mode], results[mode] = prepared
    del exact

    inputs = make_inputs(built, workload, cache_kind)
    seconds: dict[str, list[float]] = {mode: [] for mode in steps}
    kept: dict[str, object] = {}
    """Each mode's latest cache: in a sequence it is there while the next step makes another."""
    gc.collect()
    gc.disable()
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(repeats):
                for mode, step in steps.items():
                    arguments = inputs.arguments()
                    start = time.perf_counter()
                    step(arguments)
                    seconds[mode].append(time.perf_counter() - start)
                    kept[mode] = arguments
    finally:
        gc.enable()
    for mode in steps:
        done = results[mode]
        results[mode] = Result(mode, workload, "ok", done.note, tuple(seconds[mode]), done.error)
    return [results[mode] for mode in modes]


def _prepare(
    built: Built, workload: Workload, cache_kind: CacheKind, mode: str, exact: check.Reference, allowed: float
) -> tuple[Step, Result] | Result:
    """The warmed-up step and a result that still lacks times, or a result that says why there will be none."""
    if reason := too_much(needed_bytes(built.layer, workload, mode)):
        return Result(mode, workload, "skipped", reason)
    try:
        step = warmed_up(mode, built, workload, cache_kind)
        error = check.error(step, built, workload, cache_kind, exact)
    except Exception as failure:  # any error of a compiler is a result of the benchmark and must not end it
        return Result(mode, workload, "failed", summary(failure))
    if error > allowed:
        return Result(mode, workload, "wrong", check.too_far(error, allowed), (), error)
    return step, Result(mode, workload, "ok", rewritten() if mode == "mla" else "", (), error)


def rewritten() -> str:
    """What became of the attentions of the latest graph, or why they were left unchanged."""
    from mla_compile.report import last_report

    report = last_report()
    if report is None or not report.sites:
        return "no attention found" + (f": {report.note}" if report and report.note else "")
    told = Counter(site.path if site.rewritten else f"unchanged: {site.reason}" for site in report.sites)
    return ", ".join(what if count == 1 else f"{count} {what}" for what, count in told.items())
