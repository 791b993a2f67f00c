"""Run the whole comparison: build the model, measure the machine, and every way at every workload."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mla_compile.bench.generation.measure import measure
from mla_compile.bench.generation.models import WholeModel, build, limit
from mla_compile.bench.generation.ways import Batch, Result, Way
from mla_compile.cost import Device
from mla_compile.device import measure as measure_device


@dataclass(frozen=True)
class Generation:
    """What was measured."""

    whole: WholeModel
    parameters: int
    device: Device
    """The machine's rates in the model's dtype, the better of those measured before and after the run."""
    load: float
    """The load average over the minute before the run. Load slows all results."""
    limits: dict[Batch, float]
    """The lower bound on the seconds per step; see `models.limit`."""
    results: list[Result]


def run(whole: WholeModel, batches: Sequence[Batch], ways: Sequence[Way], repeats: int) -> Generation:
    """Build the model and measure. Progress goes to standard error."""
    load, cpu = os.getloadavg()[0], torch.device("cpu")
    before = measure_device(cpu, whole.layer.torch_dtype)
    model = build(whole)
    with torch.no_grad():
        results = measure(model, whole, batches, ways, repeats)
    after = measure_device(cpu, whole.layer.torch_dtype)
    flops, copied = max(before.flops_per_s, after.flops_per_s), max(before.bytes_per_s, after.bytes_per_s)
    device = Device(before.name, flops, copied)
    parameters = sum(weight.numel() for weight in model.parameters())
    limits = {batch: limit(model, whole, batch.workload, batch.size, device) for batch in batches}
    return Generation(whole, parameters, device, load, limits, results)
