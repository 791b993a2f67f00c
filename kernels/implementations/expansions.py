"""Describe calls of `mla::expanded_attention`, what implementations take of them, and a small one for the trial.

`gradients` does the same for its backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from .._common.plans import layout
from ..share import share_of
from ..visibility import causal_stop
from .trial import normal_like

if TYPE_CHECKING:
    from ..attended import Attended
    from ..expanded_attention.arguments import ExpandedAttention


B = TypeVar("B", "ExpandedAttention", "Attended")


MANY = 4096
"""From so many queries on, another implementation may be taken without a measurement: those were measured there, and
may prepare each new length for tens of milliseconds."""


@dataclass(frozen=True)
class Expanded:
    """A call, without its numbers of sequences and tokens."""

    dtype: torch.dtype
    heads: int
    widths: tuple[int, int, int]
    """P, R and V."""
    limit: str
    """`none`, or for a causal limit how many keys the first query sees: one (`first`), `more`, or `fewer`."""
    fits: bool
    """Whether all keys of a head fit the workspace at once."""
    besides: tuple[str, ...] = ()
    """What the call has that no kernel here takes."""
    rows: int = 1
    """At least how many queries there are in all sequences together: `MANY` or one."""

    @staticmethod
    def of(x: ExpandedAttention | Attended) -> Expanded | None:
        """The problem of a call; None where sizes are symbols."""
        assert x.w_uk is not None
        assert x.w_uv is not None
        offset, rope = x.causal_offset, x.k_rope.shape[-1]
        (batch, queries, heads, _), (_, nope, _), columns = x.q.shape, x.w_uk.shape, x.w_uv.shape[1]
        sizes = batch, queries, heads, nope, rope, columns, x.latent.shape[1], x.workspace_tokens
        if not all(isinstance(size, int) for size in (*sizes, 0 if offset is None else offset)):
            return None
        tokens = tokens_of(x)
        asked = {
            "a mask": x.mask is not None,
            "empty tensors": not batch * queries * heads * tokens,
            "one key on its own": any(keys.stop - keys.start == 1 for keys, _ in parts_of(offset, tokens)),
        }
        fits = tokens > 0 and share_of(max(batch, 1), max(heads, 1), tokens, x.workspace_tokens).tokens == tokens
        limit = "none" if offset is None else "fewer" if offset < 0 else "more" if offset else "first"
        besides = tuple(name for name, is_asked in asked.items() if is_asked)
        return Expanded(x.q.dtype, heads, (nope, rope, columns), limit, fits, besides, at_least(batch * queries))


def at_least(queries: int) -> int:
    """`MANY` or one, whichever is not more than the number of queries."""
    return MANY if queries >= MANY else 1


def tokens_of(x: ExpandedAttention | Attended) -> int:
    """How many keys at least one query may see."""
    return causal_stop(x.causal_offset, range(x.q.shape[1]), x.latent.shape[1])


def parts_of(causal_offset: int | None, tokens: int) -> Iterator[tuple[slice, bool]]:
    """Cut the keys that some query may see into those that all queries see, and those of which query i sees the first
    i + 1; the flag tells the latter. Each query sees at least one key."""
    cut = tokens if causal_offset is None or causal_offset + 1 >= tokens else max(causal_offset, 0)
    for part, causal in ((slice(0, cut), False), (slice(cut, tokens), True)):
        if part.stop > part.start:
            yield part, causal


@dataclass(frozen=True)
class Takes:
    """The calls that an implementation takes: those in which each query sees at least one key."""

    dtypes: tuple[torch.dtype, ...]
    widths: tuple[int, int, int]

    def refusal(self, problem: Expanded) -> str | None:
        """Why the implementation does not take a problem; None where it does."""
        if problem.besides:
            return f"does not take {' and '.join(problem.besides)}"
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


def layout_of(x: ExpandedAttention | Attended) -> Hashable:
    """Everything about the arguments that a choice may depend on."""
    return x.causal_offset, x.workspace_tokens, *map(layout, (x.q, x.latent, x.k_rope, x.w_uk, x.w_uv, x.mask))


def sizes_of(x: ExpandedAttention | Attended) -> tuple[int, ...]:
    """The numbers of sequences, queries and keys."""
    return *x.q.shape[:2], tokens_of(x)


def small(x: B) -> B:
    """Two sequences with the heads, widths and dtypes of `x`; more keys than queries, neither filling whole tiles."""
    assert x.w_uk is not None
    assert x.w_uv is not None
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
