"""Describe calls of `mla::expanded_attention`, what implementations take of them, and a small one for the trial."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .._common.plans import layout
from ..share import share_of
from ..visibility import causal_stop
from .trial import normal_like

if TYPE_CHECKING:
    from ..expanded_attention.arguments import ExpandedAttention


@dataclass(frozen=True)
class Expanded:
    """A call, without its numbers of sequences and tokens."""

    dtype: torch.dtype
    heads: int
    widths: tuple[int, int, int]
    """P, R and V."""
    limit: str
    """`none`, or for a causal limit how many keys the first query sees: one (`first`), `more`, or `fewer`."""
    masked: bool
    fits: bool
    """Whether all keys of a head fit the workspace at once."""

    @property
    def rows(self) -> int:
        """The number of heads."""
        return self.heads

    @staticmethod
    def of(x: ExpandedAttention) -> Expanded | None:
        """The problem of a call; None where sizes are symbols."""
        offset, tokens = x.causal_offset, tokens_of(x)
        (batch, _, heads, _), (_, nope, _), columns = x.q.shape, x.w_uk.shape, x.w_uv.shape[1]
        rope = x.k_rope.shape[-1]
        sizes = batch, heads, nope, rope, columns, tokens, x.workspace_tokens, 0 if offset is None else offset
        if not all(isinstance(size, int) for size in sizes):
            return None
        fits = tokens > 0 and share_of(batch, heads, tokens, x.workspace_tokens).tokens == tokens
        limit = "none" if offset is None else "fewer" if offset < 0 else "more" if offset else "first"
        return Expanded(x.q.dtype, heads, (nope, rope, columns), limit, x.mask is not None, fits)


def tokens_of(x: ExpandedAttention) -> int:
    """How many keys at least one query may see."""
    return causal_stop(x.causal_offset, range(x.q.shape[1]), x.latent.shape[1])


@dataclass(frozen=True)
class Takes:
    """The calls that an implementation takes: without a mask, and with each query seeing at least one key."""

    dtypes: tuple[torch.dtype, ...]
    widths: tuple[int, int, int]

    def refusal(self, problem: Expanded) -> str | None:
        """Why the implementation does not take a problem; None where it does."""
        if problem.masked:
            return "does not take a mask"
        if problem.dtype not in self.dtypes:
            return f"does not take {problem.dtype}"
        if problem.widths != self.widths:
            return f"takes P, R, V = {_list(self.widths)}, found {_list(problem.widths)}"
        if problem.limit == "fewer":
            return "does not take queries that see no key"
        if not problem.fits:
            return "takes all keys of a head at once, which do not fit the workspace"
        return None


def _list(widths: tuple[int, ...]) -> str:
    return ", ".join(map(str, widths))


def layout_of(x: ExpandedAttention) -> Hashable:
    """Everything about the arguments that a choice may depend on."""
    return x.causal_offset, x.workspace_tokens, *map(layout, (x.q, x.latent, x.k_rope, x.w_uk, x.w_uv, x.mask))


def sizes_of(x: ExpandedAttention) -> tuple[int, ...]:
    """The numbers of sequences, queries and keys."""
    return *x.q.shape[:2], tokens_of(x)


def small(x: ExpandedAttention) -> ExpandedAttention:
    """Two sequences with the heads, widths and dtypes of `x`; more keys than queries, neither filling whole tiles."""
    queries, tokens, normal = 70, 160, normal_like(x.q)
    rank = x.latent.shape[2]
    return dataclasses.replace(
        x,
        q=normal(2, queries, *x.q.shape[2:]),
        latent=normal(2, tokens, rank),
        k_rope=normal(2, tokens, *x.k_rope.shape[2:]),
        w_uk=normal(*x.w_uk.shape) * rank**-0.5,
        w_uv=normal(*x.w_uv.shape) * rank**-0.5,
        causal_offset=min(x.causal_offset, tokens - queries) if x.causal_offset else x.causal_offset,
        scale=x.q.shape[3] ** -0.5,  # scores of a variance of 1
    )
