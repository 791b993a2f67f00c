"""Run the whole benchmark: the workloads one after the other, then the memory of each mode."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mla_compile.bench.breakdown import Breakdown, break_down
from mla_compile.bench.layers import Layer, build
from mla_compile.bench.measure import Result, measure
from mla_compile.bench.memory import available_bytes, needed_bytes, peaks
from mla_compile.bench.progress import log
from mla_compile.bench.workloads import CacheKind, Workload, limit
from mla_compile.cost import Device
from mla_compile.device import measure as measure_device


@dataclass(frozen=True)
class Benchmark:
    """What was measured."""

    layer: Layer
    cache_kind: CacheKind
    device: Device
    """The machine's rates in the layer's dtype: the best of those measured before each workload and at the end."""
    load: float
    """The load average over the minute before the run. Load slows all results."""
    limits: dict[Workload, float]
    """The lower bound on the seconds of each workload; see `workloads.limit`."""
    results: list[Result]
    breakdowns: list[Breakdown]


def run(
    layer: Layer, workloads: Sequence[Workload], modes: Sequence[str], cache_kind: CacheKind, repeats: int
) -> Benchmark:
    """Measure. Progress goes to standard error."""
    load = os.getloadavg()[0]
    devices: list[Device] = []
    built = build(layer)
    results: list[Result] = []
    breakdowns: list[Breakdown] = []
    with torch.no_grad():
        for workload in workloads:
            log(workload)
            devices.append(measure_device(torch.device("cpu"), layer.torch_dtype))
            results += measure(built, workload, cache_kind, modes, repeats)
            available = available_bytes()
            if available is None or needed_bytes(layer, workload, "by-hand") < available:
                breakdowns.append(break_down(built, workload, cache_kind, repeats))
    devices.append(measure_device(torch.device("cpu"), layer.torch_dtype))
    device = Device(devices[0].name, max(d.flops_per_s for d in devices), max(d.bytes_per_s for d in devices))
    limits = {workload: limit(built.attention, layer, workload, device) for workload in workloads}
    del built
    return Benchmark(layer, cache_kind, device, load, limits, _with_peaks(layer, results, cache_kind), breakdowns)


def _with_peaks(layer: Layer, results: Sequence[Result], cache_kind: CacheKind) -> list[Result]:
    """The results with the peak memory of those that have a time."""
    found: dict[tuple[str, Workload], int | None] = {}
    for mode in dict.fromkeys(result.mode for result in results):
        workloads = [result.workload for result in results if result.mode == mode and result.status == "ok"]
        if workloads:
            log(f"memory of {mode}")
            amounts = peaks(layer, mode, workloads, cache_kind, torch.get_num_threads())
            found |= {(mode, workload): amount for workload, amount in zip(workloads, amounts, strict=True)}
    return [replace(result, peak_bytes=found.get((result.mode, result.workload))) for result in results]
