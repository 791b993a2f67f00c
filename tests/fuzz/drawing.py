"""What programs are drawn from: sizes, tensors and random choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

HIDDEN = 6
SCALE = 0.3


@dataclass(frozen=True)
class Sizes:
    """Those of one attention. Some are equal, so that a dimension can be mistaken for another."""

    batch: int
    queries: int
    keys: int
    heads: int
    rank: int
    nope: int
    rope: int
    value: int

    def tensors(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """`x` [B, Sq, HIDDEN], `latent` [B, T, L], `k_rope` [B, T, R], `w_q` [HIDDEN, N (P + R)] and
        `w_kv` [L, N (P + V)], float64."""
        shapes = (
            (self.batch, self.queries, HIDDEN),
            (self.batch, self.keys, self.rank),
            (self.batch, self.keys, self.rope),
            (HIDDEN, self.heads * (self.nope + self.rope)),
            (self.rank, self.heads * (self.nope + self.value)),
        )
        made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return made[0], made[1], made[2], made[3] / math.sqrt(HIDDEN), made[4] / math.sqrt(self.rank)

    def queries_of(self, x: Tensor, w_q: Tensor) -> Tensor:
        """`[B, N, Sq, P + R]`"""
        return (x @ w_q).view(self.batch, self.queries, self.heads, self.nope + self.rope).transpose(1, 2)

    def up_projected(self, latent: Tensor, w_kv: Tensor) -> Tensor:
        """Keys beside values, `[B, N, T, P + V]`."""
        return (latent @ w_kv).view(self.batch, self.keys, self.heads, self.nope + self.value).transpose(1, 2)

    def to_heads(self, k_rope: Tensor) -> Tensor:
        """`[B, N, T, R]`"""
        return k_rope[:, None].expand(-1, self.heads, -1, -1)


@dataclass(frozen=True)
class Program:
    """A function, which makes the same choices whenever it runs, and the tensors that it takes."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]


@dataclass
class Choices:
    random: Random

    def choice(self, options: Sequence[Any]) -> Any:
        return self.random.choice(options)

    def below(self, end: int) -> int:
        """One of 0 up to `end - 1`."""
        return self.random.randrange(end)

    def happens(self, chance: float) -> bool:
        return self.random.random() < chance

    def one_of(self, functions: Sequence[Callable[..., Any]], *args: Any) -> Any:
        """The result of one of some functions, which all take these choices and `args`."""
        return self.choice(functions)(self, *args)
