"""The warps of a program that `emulated` runs, and the asynchronous operations that they issue."""

from __future__ import annotations

import builtins
import random
import threading
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .emulated_memory import Barrier, Barriers, Memory, Pointer, Sums, TensorMemory

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
    block: int = 0
    go: SimpleQueue[None] = field(default_factory=SimpleQueue)
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

    def __init__(self, program: int, seed: int, blocks: int = 1) -> None:
        self.program = program
        self.blocks = blocks
        self.block = 0
        """The thread block whose warps run."""
        self.memory: list[list[Any]] = [[] for _ in builtins.range(blocks)]
        """The allocations of each block."""
        self.partitions: list[Partition] = []
        self.threads: list[threading.Thread] = []
        self.random = random.Random(seed)
        self.copies: list[Any] = []
        self.products: list[Any] = []
        self.current = Partition("all warps")
        self.turn = SimpleQueue[None]()
        self.specialised = False
        self.stopping = False

    def switch(self) -> None:
        """Let other partitions run and asynchronous operations happen before this partition goes on."""
        if self.specialised:
            me = self.current
            if not self.stopping:
                self.turn.put(None)
                me.go.get()
            if self.stopping:
                raise SystemExit

    def warp_specialize(self, functions: Any, warps: Any, registers: Any) -> None:
        """Keep what the warps of a block will do; a kernel does nothing after that."""

        def run(partition: Partition, function: Any, arguments: Any) -> None:
            partition.go.get()
            try:
                function(*arguments)
                assert not partition.products, f"{partition.name} did not wait for its products"
            except BaseException as error:  # raised again by the thread that started this one
                partition.error = error
            partition.done = True
            self.turn.put(None)

        for i, (function, arguments) in enumerate(functions):
            partition = Partition(f"{function.__name__} {i} of block {self.block}", self.block)
            self.partitions.append(partition)
            self.threads.append(threading.Thread(target=run, args=(partition, function, arguments), daemon=True))

    def run(self) -> None:
        """Run the partitions of all blocks."""
        self.specialised = True
        for thread in self.threads:
            thread.start()
        try:
            self._alternate(self.partitions)
        finally:
            self.stopping = True
            for partition in self.partitions:
                partition.go.put(None)
            for thread in self.threads:
                thread.join()
            self.specialised = False

    def _alternate(self, partitions: list[Partition]) -> None:
        slow: list[Any] = []
        while not all(partition.done for partition in partitions):
            if self.random.random() < 1 / _STEPS:  # hold others back for a while
                everything = [*partitions, self.copies, self.products, *(each.products for each in partitions)]
                slow = [each for each in everything if self.random.random() < 1 / 2]
                if self.blocks > 1:
                    block = self.random.randrange(2 * self.blocks)  # perhaps none
                    slow += [partition for partition in partitions if partition.block == block]
            able: list[Any] = [partition for partition in partitions if partition.can_run]
            if not able and not self.copies and not self.products:
                waiting = [f"{p.name} for {p.waits_for[0].name}" for p in partitions if p.waits_for and not p.done]
                raise Hang(", ".join(waiting))
            able += [asked for asked in (self.copies, self.products, *(p.products for p in partitions)) if asked]
            chosen = self.random.choice([each for each in able if not is_in(each, slow)] or able)
            if isinstance(chosen, Partition):
                self.current, self.block = chosen, chosen.block
                chosen.waits_for = None
                chosen.go.put(None)
                self.turn.get()
                if chosen.error is not None:
                    raise chosen.error
            else:
                chosen.pop(self.random.randrange(len(chosen)) if chosen is self.copies else 0)()
        assert not self.copies, "a copy that nobody waited for"
        assert not self.products, "a product that nobody waited for"

    # The methods below are stand-ins for functions that kernels call.

    def part(self, shape: list[int], layout: Any) -> list[int]:
        """The part that each block has of a tensor: the last dims are those that a layout divides."""
        own = [int(size) for size in shape]
        for steps in _divisions(layout):
            for dim, step in enumerate(steps, len(own) - len(steps)):
                own[dim] //= 2 if step else 1
        return own

    def arange(self, start: int, end: int, layout: Any) -> Tensor:
        (size,) = self.part([end - start], layout)
        first = start + (self.block * size if size < end - start else 0)
        return torch.arange(first, first + size, dtype=torch.int32)

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        mine = self.memory[self.block]
        if dtype == torch.int64:
            shared = any(not any(steps) for steps in _divisions(layout))
            names = (f"barrier {i} of block {self.block}" for i in builtins.range(shape[0]))
            new = Barriers([Barrier(name, shared) for name in names])
            mine.append(self.memory[0][len(mine)] if shared and self.block else new)
        else:
            own = self.part(shape, layout)
            data, unfenced = torch.full(own, _unwritten(dtype), dtype=dtype), torch.zeros(own, dtype=torch.bool)
            mine.append(Memory(self, data, unfenced))
        return mine[-1]

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count * (self.blocks if barrier.shared else 1)

    def wait(self, barrier: Barrier, phase: Any) -> None:
        if not barrier.shared or self.block == 0:
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

    def copy(self, source: Any, place: list[Any], barrier: Barrier, target: Memory, multicast: bool = False) -> None:
        """Copy a box to the target, or by the first block to that of all blocks."""
        self.switch()
        if multicast and self.block:
            return
        size, (page, row, column) = source.block_shape, map(int, place)
        assert 0 <= page < source.shape[0], "out of bounds"
        assert 0 <= column <= source.shape[2] - size[2], "out of bounds"
        for block in builtins.range(self.blocks) if multicast else [self.block]:
            mine, others = self.memory[self.block], self.memory[block]
            self._copy_to(target.of(mine, others), barrier.of(mine, others), source, (page, row, column), multicast)

    def _copy_to(
        self, target: Memory, barrier: Barrier, source: Any, place: tuple[int, int, int], multicast: bool
    ) -> None:
        size, (page, row, column) = source.block_shape, place
        assert not target.unfenced.any(), "a copy to what was written without a fence"
        assert target.data.shape == tuple(size)
        target.data.fill_(_unwritten(target.data.dtype))

        def arrives() -> None:
            first, stop = max(row, 0), min(row + size[1], source.shape[1])
            there = source.base[page, first:stop, column : column + size[2]]
            target.data.zero_()[0, first - row :][: len(there)] = there  # a box may begin before a page, or go on after
            barrier.bytes -= target.data.numel() * target.data.itemsize
            # Bytes may reach another block's barrier before that block tells it of them.
            assert multicast or barrier.bytes >= 0, f"{barrier.name}: more bytes than it was told of"
            barrier.settle()

        self.copies.append(arrives)

    def copy_rows(self, target: Memory, source: Pointer, mask: Any) -> None:
        self.switch()
        target.data.fill_(_unwritten(target.data.dtype))

        def arrives() -> None:
            target.data.copy_(source.load(mask))
            target.unfenced.fill_(True)  # written by threads, not by the copy engine

        self.copies.append(arrives)
        self.current.copying.append(arrives)

    def copies_arrive(self, barrier: Barrier, increment_count: bool) -> None:
        """Each thread arrives once all that it has been copying is there."""
        assert not increment_count
        self.switch()
        before, self.current.copying = self.current.copying, []

        def arrives() -> None:
            if any(is_in(each, self.copies) for each in before):
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


def _divisions(layout: Any) -> list[list[int]]:
    """For each pair of halves of the blocks, the steps of a layout's dims between them; 0 in all where they share."""
    return list(getattr(layout, "cga_layout", None) or [])


def _unwritten(dtype: torch.dtype) -> float:
    return torch.nan if dtype.is_floating_point else _GARBAGE


def is_in(one: Any, those: list[Any]) -> bool:
    """Whether one of those is this very object."""
    return any(one is each for each in those)
