"""The memories, addresses and barriers of kernels that `emulated` runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Pointer:
    """Addresses of elements of a tensor's storage."""

    base: Tensor
    offset: Tensor

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.offset + other)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        mask = torch.as_tensor(True if mask is None else mask)
        offset, mask = torch.broadcast_tensors(self.offset, mask)
        used = offset[mask]
        assert ((used >= 0) & (used < len(self.base))).all(), "an address out of bounds"
        return offset, mask

    def load(self, mask: Any = None, other: Any = 0) -> Tensor:
        offset, mask = self.places(mask)
        return torch.where(mask, self.base[torch.where(mask, offset, 0).long()], other)

    def store(self, values: Tensor, mask: Any = None) -> None:
        offset, mask = self.places(mask)
        assert values.dtype == self.base.dtype
        self.base[offset[mask].long()] = values.expand(offset.shape)[mask]


def pointer_to(tensor: Tensor) -> Pointer:
    """A pointer to a tensor's first element, from which all of the tensor's storage may be reached."""
    storage = tensor.new_empty(0).set_(tensor.untyped_storage())
    return Pointer(storage, torch.tensor(tensor.storage_offset()))


@dataclass
class Memory:
    """A view of shared memory; `unfenced` tells of each element whether a thread wrote it after the last fence."""

    machine: Any
    """The `Machine` of `emulated`, which may switch to another partition at each operation."""
    data: Tensor
    unfenced: Tensor

    def _view(self, function: Any) -> Memory:
        return Memory(self.machine, function(self.data), function(self.unfenced))

    def index(self, i: Any) -> Memory:
        return self._view(lambda t: t[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return self._view(lambda t: t.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return self._view(lambda t: t.permute(order))

    def reshape(self, shape: list[int]) -> Memory:
        return self._view(lambda t: t.view(shape))

    def reinterpret(self, shape: list[int], layout: Any) -> Memory:
        return self.reshape(self.machine.part(shape, layout))

    def of(self, mine: list[Any], others: list[Any]) -> Memory:
        """The same place in the memory of another thread block, from the allocations of this one and of that."""
        start = self.data.untyped_storage().data_ptr()
        owns = (isinstance(m, Memory) and m.data.untyped_storage().data_ptr() == start for m in mine)
        other = others[list(owns).index(True)]
        return other._view(lambda t: t.as_strided(self.data.shape, self.data.stride(), self.data.storage_offset()))

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def load(self, layout: Any) -> Tensor:
        self.machine.switch()
        return self.data.clone()

    def store(self, values: Tensor) -> None:
        self.machine.switch()
        assert values.dtype == self.data.dtype
        self.data.copy_(values)
        self.unfenced.fill_(True)
        self.machine.current.written.append(self.unfenced)

    def asynchronous(self) -> Tensor:
        """The numbers that an asynchronous operation reads."""
        assert not self.unfenced.any(), "an asynchronous operation reads what was written without a fence"
        return self.data


@dataclass
class TensorMemory(Memory):
    """A view of tensor memory; the views of an allocation share `uses`, an entry per pending product that uses it."""

    uses: list[int]

    def slice(self, start: int, length: int) -> TensorMemory:
        data, unfenced = (t.narrow(1, start, length) for t in (self.data, self.unfenced))
        return TensorMemory(self.machine, data, unfenced, self.uses)

    def load(self, layout: Any) -> Tensor:
        self.machine.switch()
        assert not self.uses, "tensor memory is read while a product is to come"
        return self.data.clone()

    def store(self, values: Tensor) -> None:
        self.machine.switch()
        assert not self.uses, "tensor memory is written while a product is to come"
        assert values.dtype == self.data.dtype
        self.data.copy_(values)


@dataclass
class Barrier:
    """The arrivals and bytes for which the present phase still waits, and the number of phases that are over."""

    name: str
    shared: bool = False
    """Whether all thread blocks of a program arrive at it; the first one alone waits."""
    count: int = 0
    pending: int = 0
    bytes: int = 0
    phases: int = 0

    def of(self, mine: list[Any], others: list[Any]) -> Barrier:
        """The same barrier of another thread block, from the allocations of this one and of that."""
        (found,) = (
            there.all[i]
            for one, there in zip(mine, others, strict=True)
            if isinstance(one, Barriers)
            for i, each in enumerate(one.all)
            if each is self
        )
        return found

    def settle(self) -> None:
        assert self.pending >= 0, f"{self.name}: more arrivals than it was made for"
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.phases += 1


@dataclass
class Barriers:
    """The barriers of an allocation."""

    all: list[Barrier]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


@dataclass(eq=False)
class Sums:
    """The result of products, of which some may be pending."""

    value: Tensor
    pending: int = 0
