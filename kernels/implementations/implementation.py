"""A kernel of another project: where it is found, what it takes, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .problem import Problem

if TYPE_CHECKING:
    from ..paged_latent_attention.arguments import PagedLatentAttention


@dataclass(frozen=True)
class Function:
    """One that is called, and how: a signature that does not take this is another function than was read."""

    name: str
    arguments: tuple[str, ...] = ()
    """By name."""
    positional: int = 0
    """How many before them, whose names differ among versions."""


@dataclass(frozen=True)
class Implementation:
    """A row of the table."""

    name: str
    homes: tuple[str, ...]
    """Modules that have it, its authors' first."""
    functions: tuple[Function, ...]
    attend: Callable[[Any, PagedLatentAttention], tuple[Tensor, Tensor]]
    """o and lse as the op returns them, by a module and the arguments."""
    architectures: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    widths: tuple[int, int]
    page_sizes: tuple[int, ...] = ()
    """All, if none is named."""
    one_row: bool = True
    """Whether it wants latent and rope key of a token side by side."""
    most_queries: int | None = None
    first_on: tuple[str, ...] = ()
    """Architectures on which it is taken unmeasured, before ours, as its authors' figures there are known."""
    first_from: int = 1
    """Rows of queries and heads from which those figures are."""

    def refusal(self, problem: Problem, arch: str) -> str | None:
        """Why it does not take a problem on an architecture; None where it does."""
        if arch not in self.architectures:
            return f"is for {' and '.join(self.architectures)}, this is {arch}"
        if problem.besides:
            return f"does not take {' and '.join(problem.besides)}"
        if problem.dtype not in self.dtypes:
            return f"takes {' and '.join(map(_short, self.dtypes))}, found {_short(problem.dtype)}"
        if problem.widths != self.widths:
            return f"takes L, R = {self.widths[0]}, {self.widths[1]}, found {problem.widths[0]}, {problem.widths[1]}"
        if self.page_sizes and problem.page_size not in self.page_sizes:
            return f"takes pages of {' or '.join(map(str, self.page_sizes))} tokens, found {problem.page_size}"
        if self.most_queries is not None and problem.queries > self.most_queries:
            return f"takes {self.most_queries} query token{'s' * (self.most_queries > 1)}, found {problem.queries}"
        if self.one_row and not problem.one_row:
            return "takes latent and rope key in one row at multiples of 16 bytes, these lie apart"
        return None

    def comes_first(self, problem: Problem, arch: str) -> bool:
        """Whether it is taken before ours where nothing is measured."""
        return arch in self.first_on and problem.rows >= self.first_from


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
