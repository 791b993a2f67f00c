"""Random changes of a tensor that keep its shape: some leave its values as they are, some do not."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .drawing import Choices

NUMBERS = 4096


@dataclass
class ChangeChoices(Choices):
    """Random choices, and the tensor `[NUMBERS]` that constants are taken from."""

    numbers: Tensor
    taken: int = 0

    def constants(self, *shape: int) -> Tensor:
        """The next numbers, in a shape."""
        count = math.prod(shape)
        start = self.taken % (NUMBERS - count)
        self.taken += count
        return self.numbers[start : start + count].view(shape)

    def broadcast(self, x: Tensor) -> Tensor:
        """Constants of a random shape that broadcasts to that of `x`."""
        return self.constants(*(size if self.happens(0.5) else 1 for size in x.shape))

    def maybe(self, x: Tensor, chance: float = 0.22) -> Tensor:
        """`x` after no change or some, each of a random one of its dimensions."""
        while self.happens(chance):
            x = self.one_of(CHANGES, x, self.below(x.dim()))
        return x

    def divisor(self, count: int) -> int:
        """One of a count, which is neither 1 nor the count unless there is no other."""
        return self.choice([d for d in range(2, count) if count % d == 0] or [1])


def indices(x: Tensor, dim: int, values: Tensor) -> Tensor:
    """`values`, one for each index of a dimension, expanded to the other dimensions of `x`."""
    shape = [1] * x.dim()
    shape[dim] = len(values)
    sizes = [*x.shape[:dim], len(values), *x.shape[dim + 1 :]]
    return values.view(shape).expand(sizes)


def place(dim: int, index: Any) -> tuple[Any, ...]:
    """What to write between brackets for an index of a dimension."""
    return (*[slice(None)] * dim, index)


# Cut and joined


def join_two(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    parts = x.tensor_split([draw.below(x.shape[dim])], dim)
    return torch.cat(parts if draw.happens(0.5) else parts[::-1], dim)


def join_chunks(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    if x.shape[dim] % 2:
        return x
    first, second = x.chunk(2, dim)
    return torch.cat(draw.choice([[first, second], [second, first], [first, first]]), dim)


def join_even_and_odd(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    if draw.happens(0.5):
        count = x.shape[dim]
        return torch.cat([x.index_select(dim, torch.arange(start, count, 2)) for start in range(2)], dim)
    return torch.cat([x[place(dim, slice(start, None, 2))] for start in range(2)], dim)


def join_one_by_one(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    return torch.cat([x.narrow(dim, i, 1) * 1.0 for i in range(x.shape[dim])], dim)


def stack(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    order = range(x.shape[dim])
    return torch.stack([x.select(dim, i) for i in (order if draw.happens(0.6) else reversed(order))], dim)


def stack_unbound(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    parts = list(x.unbind(dim))
    if draw.happens(0.3):
        draw.random.shuffle(parts)
    return torch.stack(parts, dim)


def pad_and_cut(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    before, after = draw.below(3), draw.below(3)
    padded = F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [before, after])
    return padded.narrow(dim, draw.choice([before, before, draw.below(before + after + 1)]), x.shape[dim])


# Other orders


def roll(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    return x.roll(draw.below(x.shape[dim] + 1), dim)


def flip(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    return x.flip(dim)


def index(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    order = list(range(x.shape[dim]))
    if draw.happens(0.5):
        draw.random.shuffle(order)
    return x.index_select(dim, torch.tensor(order))


def gather(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    order = indices(x, dim, torch.arange(x.shape[dim]))
    return x.gather(dim, order if draw.happens(0.5) else order.flip(dim))


def transpose(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    other = draw.below(x.dim())
    return x.transpose(dim, other) if x.shape[other] == x.shape[dim] else x


def transpose_factors(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    factors = x.unflatten(dim, (draw.divisor(x.shape[dim]), -1))
    return (factors.transpose(dim, dim + 1) if draw.happens(0.6) else factors).flatten(dim, dim + 1)


def view(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    return x.reshape(-1, x.shape[-1]).reshape(x.shape) if draw.happens(0.5) else x.flatten().view(x.shape)


def clone(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    return x.clone()


# Repeated


def expand_one(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    return x.narrow(dim, draw.below(x.shape[dim]), 1).expand(x.shape)


def repeat_a_part(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    count = x.shape[dim]
    times = draw.divisor(count)
    part = x.narrow(dim, draw.below(count - count // times + 1), count // times)
    if draw.happens(0.5):
        return part.repeat_interleave(times, dim)
    return part.repeat([times if i == dim else 1 for i in range(x.dim())])


# Written


def write_pieces(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    """A buffer that is written in up to three pieces, and sometimes over its first row again."""
    count = x.shape[dim]
    buffer = draw.choice([torch.zeros, torch.empty])(x.shape, dtype=x.dtype)
    borders = [0, *sorted(draw.random.sample(range(1, count), min(2, count - 1))), count]
    pieces = list(itertools.pairwise(borders))
    draw.random.shuffle(pieces)
    for start, end in pieces:
        buffer.narrow(dim, start, end - start).copy_(x.narrow(dim, start, end - start))
    if draw.happens(0.3):
        buffer.narrow(dim, 0, 1).copy_(x.narrow(dim, count - 1, 1))
    return buffer


def write_shifted(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    shift, count, copy = draw.below(x.shape[dim]), x.shape[dim], x.clone()
    copy.narrow(dim, 0, count - shift).copy_(x.narrow(dim, shift, count - shift))
    return copy


def write_last(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    """The last rows, written to others by their indices."""
    count, copy = x.shape[dim], x.clone()
    start = draw.below(count)
    rows = 1 + draw.below(count - start)
    to = torch.arange(start, start + rows) if draw.happens(0.7) else torch.arange(rows) + start
    written = x.narrow(dim, count - rows, rows)
    match draw.choice(["index_copy", "index_put", "scatter"]):
        case "index_copy":
            return copy.index_copy_(dim, to, written)
        case "index_put":
            copy[place(dim, to)] = written
            return copy
    return copy.scatter(dim, indices(x, dim, to), written)


# Other numbers


def scale(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    return x * draw.choice([0.5, 2.0, -1.0, 1.0]) if draw.happens(0.5) else x / draw.choice([2.0, 4.0, -2.0])


def negate(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    return -x


def bias(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    return x + draw.broadcast(x)


def gate(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    factors = draw.broadcast(x)
    return x * factors if draw.happens(0.7) else x / (factors.abs() + 0.5)


def choose_columns(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    return torch.where(draw.constants(x.shape[-1]) > 0, x, draw.choice([0.0, 1.0]))


def add_to_itself(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    return x + draw.choice([x, x * 0.5, x.flip(dim) * 0.5, x.roll(1, dim)])


def add_zeros(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    zeros = torch.zeros(x.shape, dtype=x.dtype)
    return zeros + x if draw.happens(0.5) else x - zeros * 2


def project(draw: ChangeChoices, x: Tensor, dim: int) -> Tensor:
    return (x.movedim(dim, -1) @ draw.constants(x.shape[dim], x.shape[dim])).movedim(-1, dim)


CHANGES = (
    *(join_two, join_chunks, join_even_and_odd, join_one_by_one, stack, stack_unbound, pad_and_cut),
    *(roll, flip, index, gather, transpose, transpose_factors, view, clone, expand_one, repeat_a_part),
    *(write_pieces, write_shifted, write_last),
    *(scale, negate, bias, gate, choose_columns, add_to_itself, add_zeros, project),
)
