"""Run a Gluon kernel without a GPU: its numbers, barriers and asynchronous operations are emulated in Python.

Triton's interpreter does not support Gluon. Here a kernel's functions run as they are written, on torch's tensors, with
stand-ins for the functions of Gluon. Layouts are ignored: only the compiler can tell whether they fit. What is
emulated:

- partitions of warps run side by side, in an order that is drawn anew at each operation on shared memory or a barrier;
- a barrier counts arrivals and bytes, and has phases; to wait for a phase that never ends is an error that names the
  partitions that wait;
- a TMA copy arrives at any time after it was issued, and its target is NaN until then;
- a product of a warp group happens at any time before it is waited for, and reads shared memory at that time;
- a product in tensor memory happens at any time after it was issued; until then it is an error for a thread to read or
  write its operands in tensor memory;
- it is an error if an asynchronous operation uses shared memory that a thread wrote without a fence in between;
- memory that was never written is NaN, and an address out of bounds is an error.
"""

from __future__ import annotations

import builtins
import collections
import random
import threading
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell, hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra import cuda

from ..assembly import executed
from .emulated_memory import Barrier, Barriers, Memory, Pointer, Sums, TensorMemory, pointer_to

DTYPES = dict(
    zip(
        (gl.int16, gl.int32, gl.int64, gl.float16, gl.float32, gl.bfloat16),
        (torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16),
        strict=True,
    )
)
_GARBAGE = 0x7F7F
"""What integers are in memory that was not written: as two codes of FP8, NaN."""
_THREADS = 128
"""Threads of a partition."""
_STEPS = 32
"""For how many operations, on average, the same partitions and asynchronous operations are held back."""


class Hang(AssertionError):
    """No partition can go on: those that are not done wait forever."""


@dataclass(eq=False)
class Partition:
    """The warps that run one function of `warp_specialize`."""

    name: str
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waits_for: tuple[Barrier, int] | None = None
    products: list[Any] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)
    copying: list[Any] = field(default_factory=list)
    done: bool = False
    error: BaseException | None = None

    @property
    def can_run(self) -> bool:
        return not self.done and (self.waits_for is None or self.waits_for[0].phases % 2 != self.waits_for[1])


class Machine:
    """The warps of a program, and the asynchronous operations that they issued."""

    def __init__(self, program: int, seed: int) -> None:
        self.program = program
        self.random = random.Random(seed)
        self.copies: list[Any] = []
        self.products: list[Any] = []
        self.current = Partition("all warps")
        self.turn = threading.Semaphore(0)
        self.specialised = False
        self.stopping = False

    def switch(self) -> None:
        """Let other partitions run and asynchronous operations happen before this partition goes on."""
        if self.specialised:
            me = self.current
            if not self.stopping:
                self.turn.release()
                me.go.acquire()
            if self.stopping:
                raise SystemExit

    def warp_specialize(self, functions: Any, warps: Any, registers: Any) -> None:
        partitions = [Partition(f"{function.__name__} {i}") for i, (function, _) in enumerate(functions)]

        def run(partition: Partition, function: Any, arguments: Any) -> None:
            partition.go.acquire()
            try:
                function(*arguments)
                assert not partition.products, f"{partition.name} did not wait for its products"
            except BaseException as error:  # raised again by the thread that started this one
                partition.error = error
            partition.done = True
            self.turn.release()

        threads = [
            threading.Thread(target=run, args=(partition, *each), daemon=True)
            for partition, each in zip(partitions, functions, strict=True)
        ]
        self.specialised = True
        for thread in threads:
            thread.start()
        try:
            self._alternate(partitions)
        finally:
            self.stopping = True
            for partition in partitions:
                partition.go.release()
            for thread in threads:
                thread.join()
            self.specialised = False

    def _alternate(self, partitions: list[Partition]) -> None:
        slow: list[Any] = []
        while not all(partition.done for partition in partitions):
            if self.random.random() < 1 / _STEPS:  # hold others back for a while
                everything = [*partitions, self.copies, self.products, *(each.products for each in partitions)]
                slow = [each for each in everything if self.random.random() < 1 / 2]
            able: list[Any] = [partition for partition in partitions if partition.can_run]
            if not able and not self.copies and not self.products:
                waiting = [f"{p.name} for {p.waits_for[0].name}" for p in partitions if p.waits_for and not p.done]
                raise Hang(", ".join(waiting))
            able += [asked for asked in (self.copies, self.products, *(p.products for p in partitions)) if asked]
            chosen = self.random.choice([each for each in able if not _is_in(each, slow)] or able)
            if isinstance(chosen, Partition):
                self.current = chosen
                chosen.waits_for = None
                chosen.go.release()
                self.turn.acquire()
                if chosen.error is not None:
                    raise chosen.error
            else:
                chosen.pop(self.random.randrange(len(chosen)) if chosen is self.copies else 0)()
        assert not self.copies, "a copy that nobody waited for"
        assert not self.products, "a product that nobody waited for"

    # The methods below are stand-ins for functions that kernels call.

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if dtype == torch.int64:
            return Barriers([Barrier(f"barrier {i}") for i in builtins.range(shape[0])])
        return Memory(self, torch.full(shape, _unwritten(dtype), dtype=dtype), torch.zeros(shape, dtype=torch.bool))

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def wait(self, barrier: Barrier, phase: Any) -> None:
        self.current.waits_for = barrier, int(phase)
        self.switch()

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        self.switch()
        barrier.pending -= count
        barrier.settle()

    def expect(self, barrier: Barrier, size: int) -> None:
        self.switch()
        barrier.bytes += size
        barrier.pending -= 1
        barrier.settle()

    def copy(self, source: Any, place: list[Any], barrier: Barrier, target: Memory) -> None:
        self.switch()
        size, (page, row, column) = source.block_shape, map(int, place)
        assert 0 <= page < source.shape[0], "out of bounds"
        assert 0 <= column <= source.shape[2] - size[2], "out of bounds"
        assert not target.unfenced.any(), "a copy to what was written without a fence"
        assert target.data.shape == tuple(size)
        target.data.fill_(_unwritten(target.data.dtype))

        def arrives() -> None:
            first, stop = max(row, 0), min(row + size[1], source.shape[1])
            there = source.base[page, first:stop, column : column + size[2]]
            target.data.zero_()[0, first - row :][: len(there)] = there  # a box may begin before a page, or go on after
            barrier.bytes -= target.data.numel() * target.data.itemsize
            assert barrier.bytes >= 0, f"{barrier.name}: more bytes than it was told of"
            barrier.settle()

        self.copies.append(arrives)

    def copy_rows(self, target: Memory, source: Pointer, mask: Any) -> None:
        self.switch()
        target.data.fill_(_unwritten(target.data.dtype))

        def arrives() -> None:
            target.data.copy_(_load(source, mask))
            target.unfenced.fill_(True)  # written by threads, not by the copy engine

        self.copies.append(arrives)
        self.current.copying.append(arrives)

    def copies_arrive(self, barrier: Barrier, increment_count: bool) -> None:
        """Each thread arrives once all that it has been copying is there."""
        assert not increment_count
        self.switch()
        before, self.current.copying = self.current.copying, []

        def arrives() -> None:
            if any(_is_in(each, self.copies) for each in before):
                self.copies.append(arrives)
            else:
                barrier.pending -= _THREADS
                barrier.settle()

        self.copies.append(arrives)

    def fence_async_shared(self) -> None:
        while self.current.written:
            self.current.written.pop().fill_(False)

    def warpgroup_mma(self, a: Any, b: Memory, sums: Any, *, use_acc: bool = True, is_async: bool = False) -> Sums:
        assert is_async
        self.switch()
        result = sums if isinstance(sums, Sums) else Sums(sums.clone())
        kept = a.clone() if isinstance(a, Tensor) else a

        def happens() -> None:
            left = kept if isinstance(kept, Tensor) else kept.asynchronous()
            # Not checked by `Poisoned`: scores of keys that were not loaded are NaN, and are hidden later.
            with _disable_current_modes():
                product = left.float() @ b.asynchronous().float()
            result.value = result.value + product if use_acc else product
            result.pending -= 1

        result.pending += 1
        self.current.products.append(happens)
        return result

    def allocate_tensor_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> TensorMemory:
        unfenced = torch.zeros(shape, dtype=torch.bool)
        return TensorMemory(self, torch.full(shape, torch.nan, dtype=dtype), unfenced, [])

    def tcgen05_mma(
        self, a: Memory, b: Memory, sums: TensorMemory, *, use_acc: Any = True, mbarriers: Any = ()
    ) -> None:
        self.switch()
        used = [memory.uses for memory in (a, sums) if isinstance(memory, TensorMemory)]
        for uses in used:
            uses.append(1)

        def happens() -> None:
            with _disable_current_modes():
                product = a.asynchronous().float() @ b.asynchronous().float()
            sums.data.copy_(sums.data + product if bool(use_acc) else product)
            for uses in used:
                uses.pop()
            for barrier in mbarriers:
                barrier.pending -= 1
                barrier.settle()

        self.products.append(happens)

    def warpgroup_mma_wait(self, outstanding: int, deps: tuple[Any, ...]) -> Any:
        self.switch()
        while len(self.current.products) > outstanding:
            self.current.products.pop(0)()
        values = tuple(dep.value if isinstance(dep, Sums) and not dep.pending else dep for dep in deps)
        return values if len(values) > 1 else values[0]


def _unwritten(dtype: torch.dtype) -> float:
    return torch.nan if dtype.is_floating_point else _GARBAGE


def _is_in(one: Any, those: list[Any]) -> bool:
    return any(one is each for each in those)


def _number(x: Any) -> Any:
    return x if isinstance(x, Tensor) else torch.tensor(x)


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    offset, mask = pointer.places(mask)
    return torch.where(mask, pointer.base[torch.where(mask, offset, 0).long()], other)


def _store(pointer: Pointer, values: Tensor, mask: Any = None) -> None:
    offset, mask = pointer.places(mask)
    assert values.dtype == pointer.base.dtype
    pointer.base[offset[mask].long()] = values.expand(offset.shape)[mask]


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
        load=_load,
        store=_store,
        arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
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
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
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
        if isinstance(value, gluon._runtime.GluonJITFunction) and not _is_in(value.fn.__globals__, known):
            known.append(value.fn.__globals__)
            _globals_of_functions(value.fn.__globals__, known)
    return known[1:]


class Emulated:
    """The stand-in for a kernel of a module, launched in the same way."""

    def __init__(self, module: Any, kernel: Any, seed: int) -> None:
        self.module, self.name, self.seed = module, kernel.fn.__name__, seed
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, num_warps: int, enable_fp_fusion: bool, launch_pdl: bool, **constants: Any) -> None:
            self.launches += 1
            given = [pointer_to(a) if isinstance(a, Tensor) else a for a in arguments]
            for program in builtins.range(grid[0]):
                machine = Machine(program, self.seed * 1000 + program)
                _namespace(self.module, machine)[self.name](*given, **constants)

        return launch
