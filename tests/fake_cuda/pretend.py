"""Pretend that there is a GPU, as far as torch, Inductor and Triton ask before anything is launched."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.fx_passes.fuse_attention
import torch._inductor.fx_passes.misc_patterns
import torch._inductor.fx_passes.pad_mm
import torch.utils._triton
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mla_compile import device
from mla_compile.cost import Device
from mla_compile.kernels import native

GUARD = Path(__file__).with_name("guard.cpp")
RATES = {"h100": Device("H100", flops_per_s=8e14, bytes_per_s=3e12), "a100": Device("A100", 2.6e14, 1.6e12)}
"""Rates of large products in bfloat16 and of copies, near what is commonly measured; paths are chosen by them."""
_H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "type": "cuda",
    "index": 0,
    "major": 9,
    "minor": 0,
    "cc": 90,
    "gcnArchName": "",
    "total_memory": 80 << 30,
    "L2_cache_size": 50 << 20,
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 227 << 10,
    "shared_memory_per_multiprocessor": 228 << 10,
}
_A100 = _H100 | {
    "name": "NVIDIA A100-SXM4-80GB",
    "major": 8,
    "cc": 80,
    "L2_cache_size": 40 << 20,
    "multi_processor_count": 108,
    "shared_memory_per_block_optin": 163 << 10,
    "shared_memory_per_multiprocessor": 164 << 10,
}
Properties = collections.namedtuple("Properties", _H100)
GPUS = {"h100": Properties(**_H100), "a100": Properties(**_A100)}


class _Driver:
    """Triton's driver, for a device for which nothing is compiled or launched."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.gpu.cc, self.gpu.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_current_stream(self, *_: Any) -> int:
        return 0

    def is_active(self) -> bool:
        return True


@contextlib.contextmanager
def present(name: str) -> Iterator[None]:
    """A context in which tensors with `device="cuda"` are fake, and code for them is compiled for one of `GPUS`.

    The device guard of a torch that was built for CUDA is replaced. Raises: RuntimeError, if there is a GPU, or no C++
    compiler.
    """
    if torch.cuda.is_available() or torch.version.hip:
        raise RuntimeError("expected a machine without a GPU, and a torch that is not for AMD's")
    # The library that the guard is registered with. Torch loads it, but does not make its symbols global.
    ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"), mode=ctypes.RTLD_GLOBAL)
    if native.start_library((GUARD,))() is None:
        raise RuntimeError("expected a C++ compiler, found none that torch finds")
    with contextlib.ExitStack() as stack:
        for patch in _patches(GPUS[name], RATES[name]):
            stack.enter_context(patch)
        stack.enter_context(inductor_config.patch(joint_graph_constant_folding=False, fx_graph_cache=False))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        from triton.runtime.driver import driver

        driver.set_active(_Driver(GPUS[name]))
        stack.enter_context(FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True))
        yield


def _patches(gpu: Any, rates: Device) -> Iterator[Any]:
    answers = {"get_device_properties": gpu, "get_device_name": gpu.name}
    answers["get_device_capability"] = gpu.major, gpu.minor
    answers |= {"current_device": 0, "device_count": 1, "is_available": True, "is_bf16_supported": True}
    answers |= {"is_current_stream_capturing": False}
    answers["get_rng_state"] = torch.zeros(1)
    answers |= dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), 0)
    answers |= dict.fromkeys(("set_device", "synchronize", "set_rng_state", "_lazy_init"))
    for name, answer in answers.items():
        yield mock.patch.object(torch.cuda, name, _always(answer))
    yield mock.patch.object(torch.cuda, "_get_device_properties", _always(gpu), create=True)
    yield mock.patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(_always(gpu)))
    yield mock.patch.object(CudaInterface.Worker, "current_device", staticmethod(_always(0)))
    interface = {"get_compute_capability": gpu.cc, "is_available": True, "is_triton_capable": True}
    for name, answer in (interface | {"raise_if_triton_unavailable": None}).items():
        yield mock.patch.object(CudaInterface, name, staticmethod(_always(answer)))
    # The following looks for Triton's compiler, or traces patterns with tensors on the device.
    has_triton = torch.utils._triton.has_triton
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.") and vars(module).get("has_triton") is has_triton:
            yield mock.patch.object(module, "has_triton", _always(True))
    yield mock.patch.object(torch.utils._triton, "triton_hash_with_backend", _always("0" * 64))
    passes = torch._inductor.fx_passes
    yield mock.patch.object(passes.fuse_attention, "_sfdp_init", _always(None))
    yield mock.patch.object(passes.pad_mm, "_pad_mm_init", _always(None))
    yield mock.patch.object(passes.misc_patterns, "_misc_patterns_init", _always(None))
    yield mock.patch.object(torch._subclasses.fake_tensor, "init_gpu_context", _always(None))
    yield mock.patch.object(device, "measured", _always(rates))


def _always(answer: Any) -> Any:
    return lambda *_, **__: answer
