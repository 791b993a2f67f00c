"""Peak rates of the present device, measured once for all processes that share Inductor's cache directory.

The rates enter decisions of the cost model, and so the key of compiled artifacts. Hence a second process must use the
same numbers as the first: they are rounded and stored as JSON, one file for each device, dtype and torch version.
Delete `<inductor cache>/mla_compile/` to measure again.
"""

import functools
import logging
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._filelock import FileLock
from torch.utils._python_dispatch import _disable_current_modes

from mla_compile import cache_files
from mla_compile.cost import Device
from mla_compile.cpu_products import has_products

_log = logging.getLogger(__name__)

COPY_BYTES = 128 * 2**20
"""The size of each of the two buffers of the copy: several times a large last-level cache."""
COPIES = 16
"""The number of copies that a GPU makes while it is waited for once: the host takes microseconds to launch one and to
learn that it ended, and at 4.3 TB/s a copy takes 63."""
GEMM_SIZES = (256, 512, 1024, 2048, 4096, 8192)
GEMM_SECONDS = 0.01
"""A product that takes this long is large enough for start-up and thread synchronisation not to show."""
REPEAT_SECONDS = 0.05
"""How long each call is repeated. It runs at least twice, as the first call starts threads and libraries."""
ASSUMED_CPU = (1e12, 1e11)
"""FLOP/s and bytes/s of a CPU that cannot be measured: the order of a server's."""
ASSUMED_HALF, ASSUMED = (3.1e14, 1.6e12), (2.0e13, 1.6e12)
"""Those of any other device, in half precision and in wider dtypes: an A100's, from its data sheet."""


def measured(device: torch.device, dtype: torch.dtype) -> Device:
    """Peak FLOP/s of a matrix product in `dtype` and bytes/s of a copy on `device`, two significant digits each.

    Reads the stored numbers. If there are none or the file is not valid, it measures (about half a second) and stores
    them. It may be called while a graph is being traced, and does not change the random state. CPU rates are those of
    `torch.get_num_threads()` threads. It takes the best of several runs, but on a busy machine rates are still too low.

    Where measuring fails, because less than 1 GiB is free or the device computes nothing (`meta`), a warning is logged
    and the rates are assumed: `ASSUMED` and its like. They are not stored, so that a later call measures.

    Raises ValueError if `dtype` is not a floating dtype of at least two bytes.
    """
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"expected a floating dtype of at least two bytes to measure the device with, found {dtype}")
    name, dtype = _name(device), _multiplied(device, dtype)
    path = _path(name, dtype)
    with FileLock(f"{path}.lock"):
        stored = cache_files.read(path, _rates)
        if stored is not None and stored.name == name:
            return stored
        try:
            rates = measure(device, dtype)
        except RuntimeError as error:  # only CUDA has a class of its own for memory that is used up
            rates = _assumed(device, dtype)
            _log.warning("%s could not be measured, %s is assumed: %s", device, rates, error)
            return rates
        cache_files.write(path, asdict(rates))
        return rates


def rates_of(inputs: Sequence[Any]) -> Device:
    """The rates of the device on which a graph runs, in the dtype of its first floating input of two bytes or more."""
    tensors = [t for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point() and t.itemsize > 1]
    if not tensors:
        return measured(torch.device("cpu"), torch.float32)
    return measured(tensors[0].device, tensors[0].dtype)


def measure(device: torch.device, dtype: torch.dtype) -> Device:
    """Measure now what `measured` would store, and store nothing."""
    dtype = _multiplied(device, dtype)
    with _disable_current_modes(), torch.no_grad():
        return Device(_name(device), _two_digits(_gemm_rate(device, dtype)), _two_digits(_copy_rate(device)))


def _multiplied(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of `dtype` run: float32 for half precision on a CPU without a library for it."""
    return torch.float32 if device.type == "cpu" and not has_products(dtype) else dtype


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{_cpu_model()}, {torch.get_num_threads()} threads"
    name_of = getattr(_module(device), "get_device_name", None)  # Apple's GPUs have none
    return device.type if name_of is None else str(name_of(device))


def _module(device: torch.device) -> ModuleType | None:
    """torch's module for a type of devices; None if it has none, as for `meta`."""
    return getattr(torch, device.type, None)


def _assumed(device: torch.device, dtype: torch.dtype) -> Device:
    if device.type == "cpu":
        return Device(_name(device), *ASSUMED_CPU)
    return Device(_name(device), *(ASSUMED_HALF if dtype.itemsize == 2 else ASSUMED))


def _cpu_model() -> str:
    try:
        models = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        models = []
    return models[0].strip() if models else platform.processor() or platform.machine()


def _path(name: str, dtype: torch.dtype) -> Path:
    return cache_files.path_of(re.sub(r"[^A-Za-z0-9.+]+", "-", f"{name}-{dtype}-torch-{torch.__version__}"))


def _rates(stored: Any) -> Device:
    return Device(str(stored["name"]), float(stored["flops_per_s"]), float(stored["bytes_per_s"]))


def _two_digits(rate: float) -> float:
    return float(f"{rate:.1e}")


def _gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest square product: small ones are slow on a busy CPU, large ones slow without matrix units."""
    generator = torch.Generator(device).manual_seed(0)
    best = 0.0
    for size in GEMM_SIZES:
        left, right = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
        seconds = min(_best_seconds(device, functools.partial(mm, left, right)) for mm in _products(device, dtype))
        best = max(best, 2 * size**3 / seconds)
        if seconds > GEMM_SECONDS:
            break
    return best


def _products(device: torch.device, dtype: torch.dtype) -> list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Ways to multiply. torch has two libraries on CPU, one of which may not use the CPU's widest vectors.

    There are two in float32 only: in half precision oneDNN needs CPU instructions for it, and where these exist `mm`
    uses oneDNN anyway.
    """
    if device.type != "cpu" or dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return [torch.mm]
    return [torch.mm, lambda left, right: torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")]


def _copy_rate(device: torch.device) -> float:
    """Bytes/s, reads plus writes, of a copy between two buffers. It is not in a CUDA graph, where copies are slower."""
    # Both are filled first: all pages that were never written map to one page, which is read impossibly fast.
    source = torch.full((COPY_BYTES // 4,), 1.0, dtype=torch.float32, device=device)
    target = torch.full_like(source, 2.0)
    copies = 1 if device.type == "cpu" else COPIES

    def copy() -> None:
        for _ in range(copies):
            target.copy_(source)

    return copies * 2 * COPY_BYTES / _best_seconds(device, copy)


def _best_seconds(device: torch.device, call: Callable[[], object]) -> float:
    until = time.perf_counter() + REPEAT_SECONDS
    best = min(_seconds(device, call) for _ in range(2))
    while time.perf_counter() < until:
        best = min(best, _seconds(device, call))
    return best


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
