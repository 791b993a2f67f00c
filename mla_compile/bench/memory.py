"""Measure memory: how much is available, how much a mode will need, and how much a call took.

The peak is measured in a separate process for each mode. It is the growth of resident memory during one call after
warm-up: `VmHWM` after the call, which is reset through `/proc/self/clear_refs` just before it, minus `VmRSS` before the
call. It includes everything that the call allocates, also its output and the grown cache.
"""

import functools
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_compile.bench.layers import Layer, build
from mla_compile.bench.modes import summary, warmed_up
from mla_compile.bench.progress import log
from mla_compile.bench.workloads import CacheKind, Workload, make_inputs

CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""The files with the container's memory limit and use: cgroup v2, then v1."""


def available_bytes() -> int | None:
    """The memory available without swapping, in this container; None if the system does not tell."""
    try:
        amounts = [_kib("/proc/meminfo", "MemAvailable")]
    except (OSError, ValueError):
        return None
    for limit, used in CGROUP_FILES:
        try:
            amounts.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return min(amounts)


def too_much(needed: int) -> str:
    """Why something that needs `needed` bytes is not tried; empty if it fits."""
    available = available_bytes()
    if available is None or needed <= available:
        return ""
    return f"needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available"


def _kib(path: str, field: str) -> int:
    """A field of a /proc file, in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path(path).read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f"{path} has no field {field}")
    return int(match[1]) * 1024


def needed_bytes(layer: Layer, workload: Workload, mode: str, at_once: int | None = None) -> int:
    """An upper bound on the memory of one call in this mode, with at most `at_once` queries, to skip what will not fit.

    Unmodified transformers: the output of `kv_b_proj`, the keys and a scaled copy of them, and for several queries
    copies of these and two and a half matrices of scores `[N, Sq, T]` (SDPA falls back to plain products if values are
    not as wide as keys). Measured eager peaks for V2-Lite's dims are 80 % to 100 % of this. Absorbed: another copy of
    the cache, and queries and outputs in latent space.
    """
    queries, keys = min(workload.queries, at_once or workload.queries), workload.keys
    if mode in ("eager", "inductor"):
        per_key = layer.N * (2 * (layer.P + layer.R) + layer.P + layer.V)
        per_query = layer.N * (4 * (layer.P + layer.R) + 3 * layer.V)
        scores = 0 if queries == 1 else 5 * layer.N * queries * keys // 2
    else:
        per_key = layer.L + layer.R
        per_query = layer.N * (3 * (layer.L + layer.R) + 2 * (layer.P + layer.R + layer.V))
        scores = 2 * layer.N * keys if queries == 1 else 0
    return layer.torch_dtype.itemsize * (per_key * keys + per_query * queries + scores)


def needed_to_train(layer: Layer, mode: str, tokens: int) -> int:
    """The approximate memory of forward and backward in this mode of `training`, to skip what will not fit.

    It counts the gradients of the weights, and queries, keys and equally wide values with their gradients. Unmodified
    transformers also takes two matrices `[N, T, T]`: softmax weights and their gradients. Measured peaks of V2-Lite's
    and V3's layers at 1024 to 8192 tokens are 67 % to 108 % of this.
    """
    query_weights = layer.hidden * layer.N * (layer.P + layer.R)
    if layer.Lq is not None:
        query_weights = layer.Lq * (layer.hidden + layer.N * (layer.P + layer.R))
    weights = query_weights + layer.hidden * (layer.L + layer.R) + layer.N * layer.L * (layer.P + layer.V)
    weights += layer.N * layer.V * layer.hidden
    scores = 0 if mode == "mla" else 2 * layer.N * tokens**2
    return layer.torch_dtype.itemsize * (weights + 6 * layer.N * (layer.P + layer.R) * tokens + scores)


def peak_growth(call: Callable[[], object]) -> int | None:
    """The largest growth of resident memory during the call, in bytes; None if the system cannot tell."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
        before = _kib("/proc/self/status", "VmRSS")
        result = call()
        peak = _kib("/proc/self/status", "VmHWM")
    except (OSError, ValueError):
        return None
    del result
    return peak - before


def kept_for_backward(call: Callable[[], object], besides: Iterable[Tensor]) -> int:
    """Bytes of the tensors that autograd keeps for a call's backward, without those of `besides`, which exist anyway.

    A storage counts once and as a whole, however many tensors share it.
    """
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = call()
    del result
    for tensor in besides:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def peaks(
    layer: Layer, mode: str, workloads: Sequence[Workload], cache_kind: CacheKind, threads: int
) -> list[int | None]:
    """`peak_growth` of each workload in this mode, in a separate process.

    None if it is unknown, or the call or the process failed; the reason goes to standard error.
    """
    task = {"layer": asdict(layer), "mode": mode, "workloads": [asdict(w) for w in workloads], "cache": cache_kind}
    done = answered("mla_compile.bench.memory", task, threads)
    answers: list[int | str | None] = [json.loads(line) for line in done.stdout.splitlines()]
    failures = [answer for answer in answers if isinstance(answer, str)]
    if done.returncode:
        failures.append(f"the process ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    for failure in failures:
        log(f"memory of {mode}: {failure}")
    answers += [None] * (len(workloads) - len(answers))
    return [None if isinstance(answer, str) else answer for answer in answers]


def answered(module: str, task: dict[str, Any], threads: int) -> subprocess.CompletedProcess[str]:
    """Run a module in a new process with a task on its standard input, and return the completed process."""
    # From a fixed size on, glibc then maps memory directly and returns it at once, so freed memory does not stay
    # resident.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-P", "-m", module]  # -P: do not import the package from the working directory
    return subprocess.run(command, input=json.dumps(task), env=environment, capture_output=True, text=True)


def _child() -> None:
    """Answer the task on standard input with a line for each workload: bytes, null, or why it failed."""
    task = json.load(sys.stdin)
    built, cache_kind = build(Layer(**task["layer"])), task["cache"]
    with torch.no_grad():
        for fields in task["workloads"]:
            torch.compiler.reset()
            workload = Workload(**fields)
            try:
                step = warmed_up(task["mode"], built, workload, cache_kind)
                arguments = make_inputs(built, workload, cache_kind).arguments()
                answer: int | str | None = peak_growth(functools.partial(step, arguments))
            except Exception as failure:  # any error of a compiler; the next workload may still work
                answer = summary(failure)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _child()
