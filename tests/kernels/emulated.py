"""Run a Gluon kernel without a GPU: its numbers, barriers and asynchronous operations are emulated in Python.

Triton's interpreter does not support Gluon. Here a kernel's functions run as they are written, on torch's tensors, with
stand-ins for the functions of Gluon. Of layouts, only the division among thread blocks is looked at: whether they fit,
only the compiler can tell. What is emulated:

- partitions of warps run side by side, in an order that is drawn anew at each operation on shared memory or a barrier;
- a barrier counts arrivals and bytes, and has phases; to wait for a phase that never ends is an error that names the
  partitions that wait;
- a TMA copy arrives at any time after it was issued, and its target is NaN until then;
- a product of a warp group happens at any time before it is waited for, and reads shared memory at that time;
- a product in tensor memory happens at any time after it was issued; until then it is an error for a thread to read or
  write its operands in tensor memory;
- it is an error if an asynchronous operation uses shared memory that a thread wrote without a fence in between;
- thread blocks of a program have the part of each tensor that its layout gives them; a copy to all of them arrives at
  each at another time, and what they do with a barrier that they share is what Triton's compiler makes of it;
- memory that was never written is NaN, and an address out of bounds is an error.
"""

from __future__ import annotations

import builtins
import collections
import types
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell, hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra import cuda

from ..assembly import executed
from .emulated_machine import Machine, is_in
from .emulated_memory import pointer_to

DTYPES = dict(
    zip(
        (gl.int16, gl.int32, gl.int64, gl.float16, gl.float32, gl.bfloat16),
        (torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16),
        strict=True,
    )
)


def _number(x: Any) -> Any:
    return x if isinstance(x, Tensor) else torch.tensor(x)


def _inline_asm_elementwise(
    asm: str, constraints: str, args: list[Tensor], dtype: Any, is_pure: bool, pack: int
) -> Any:
    """Elements that follow each other in memory are neighbours in a register."""
    assert is_pure
    inputs = torch.broadcast_tensors(*args)
    bits = (t.contiguous().view(torch.int16).numpy() for t in inputs)
    found = executed(asm, constraints, pack, *bits)
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    results = tuple(torch.from_numpy(bits).view(kind) for bits, kind in zip(found, kinds, strict=True))
    return results if isinstance(dtype, tuple) else results[0]


def _language(machine: Machine) -> types.SimpleNamespace:
    """The stand-in for `triton.experimental.gluon.language`."""
    return types.SimpleNamespace(
        program_id=lambda axis: torch.tensor(machine.program),
        load=lambda pointer, mask=None, other=0: pointer.load(mask, other),
        store=lambda pointer, values, mask=None: pointer.store(values, mask),
        arange=machine.arange,
        cdiv=lambda a, b: (a + b - 1) // b,
        minimum=lambda a, b: torch.minimum(_number(a), _number(b)),
        maximum=lambda a, b: torch.maximum(_number(a), _number(b)),
        max=lambda x, axis: x.amax(axis),
        min=lambda x, axis: x.amin(axis),
        sum=lambda x, axis: x.sum(axis),
        exp2=torch.exp2,
        log=torch.log,
        log2=torch.log2,
        where=torch.where,
        full=lambda shape, value, dtype, layout: torch.full(machine.part(shape, layout), value, dtype=dtype),
        zeros=lambda shape, dtype, layout: torch.zeros(machine.part(shape, layout), dtype=dtype),
        zeros_like=torch.zeros_like,
        convert_layout=lambda x, layout: x,
        SliceLayout=gl.SliceLayout,
        BlockedLayout=gl.BlockedLayout,
        DistributedLinearLayout=gl.DistributedLinearLayout,
        DotOperandLayout=gl.DotOperandLayout,
        NVMMADistributedLayout=gl.NVMMADistributedLayout,
        NVMMASharedLayout=gl.NVMMASharedLayout,
        inline_asm_elementwise=_inline_asm_elementwise,
        cast=lambda x, dtype, bitcast: x.view(dtype),
        static_range=builtins.range,
        allocate_shared_memory=machine.allocate_shared_memory,
        warp_specialize=machine.warp_specialize,
        **{str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()},
    )


def _tensors(start: Any, stop: Any = None, step: Any = 1) -> Any:
    start, stop = (0, start) if stop is None else (start, stop)
    return map(torch.tensor, builtins.range(int(start), int(stop), int(step)))


def _namespace(module: Any, machine: Machine) -> dict[str, Any]:
    """The global names of a kernel's module, with stand-ins for those of Gluon."""
    barriers = types.SimpleNamespace(
        init=machine.init, wait=machine.wait, arrive=machine.arrive, expect=machine.expect, MBarrierLayout=lambda: None
    )
    known = {
        id(gl): _language(machine),
        id(hopper.mbarrier): barriers,
        id(hopper.fence_async_shared): machine.fence_async_shared,
        id(hopper.warpgroup_mma): machine.warpgroup_mma,
        id(hopper.warpgroup_mma_wait): machine.warpgroup_mma_wait,
        id(async_copy.mbarrier_arrive): machine.copies_arrive,
        id(blackwell.allocate_tensor_memory): machine.allocate_tensor_memory,
        id(blackwell.tcgen05_mma): machine.tcgen05_mma,
        id(cuda.gdc_wait): lambda: None,  # one kernel after the other
        id(cuda.gdc_launch_dependents): lambda: None,
    }
    names: dict[str, Any] = {"range": _tensors}
    everything = collections.ChainMap(vars(module), *_globals_of_functions(vars(module), [vars(module)]))
    for name, value in everything.items():
        if isinstance(value, gluon._runtime.GluonJITFunction):
            code = value.fn
            names[name] = types.FunctionType(code.__code__, names, name, code.__defaults__)
        elif isinstance(value, gl.constexpr):
            names[name] = value.value
        elif name in ("copy", "copy_rows"):
            names[name] = getattr(machine, name)
        else:
            names[name] = known.get(id(value), names.get(name, value))
    return names


def _globals_of_functions(names: dict[str, Any], known: list[Any]) -> list[dict[str, Any]]:
    """The global names of kernels' functions among some, and of the functions among these."""
    for value in names.values():
        if isinstance(value, gluon._runtime.GluonJITFunction) and not is_in(value.fn.__globals__, known):
            known.append(value.fn.__globals__)
            _globals_of_functions(value.fn.__globals__, known)
    return known[1:]


class Emulated:
    """The stand-in for a kernel of a module, launched in the same way."""

    def __init__(self, module: Any, kernel: Any, seed: int) -> None:
        self.module, self.name, self.seed = module, kernel.fn.__name__, seed
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(
            *arguments: Any,
            num_warps: int,
            enable_fp_fusion: bool,
            launch_pdl: bool,
            num_ctas: int = 1,
            **constants: Any,
        ) -> None:
            self.launches += 1
            given = [pointer_to(a) if isinstance(a, Tensor) else a for a in arguments]
            for program in builtins.range(grid[0]):
                machine = Machine(program, self.seed * 1000 + program, num_ctas)
                for machine.block in builtins.range(num_ctas):
                    _namespace(self.module, machine)[self.name](*given, **constants)
                machine.run()

        return launch
