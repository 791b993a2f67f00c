"""Describe calls of `mla::paged_latent_attention`, and convert their tensors to what other projects require."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._common.addresses import ALIGNED, begins_aligned
from .._common.plans import layout
from .._common.sizes import always
from .trial import normal_like

if TYPE_CHECKING:
    from ..paged_latent_attention.arguments import PagedLatentAttention

_PAGE = 256
"""The size of pages of the trial where a call has larger ones, besides what is left over."""


@dataclass(frozen=True)
class Codes:
    """Latents in FP8 or INT8."""

    dtype: torch.dtype
    groups: int
    """The number of scales of a token."""
    rope_too: bool
    """Whether rope keys are codes too."""


@dataclass(frozen=True)
class Paged:
    """A call, without its batch size and its lengths, for which no kernel here refuses a call."""

    dtype: torch.dtype
    """The dtype of the queries."""
    queries: int
    heads: int
    widths: tuple[int, int]
    """L and R."""
    page_size: int
    causal: bool
    one_row: bool
    """Whether latent and rope key of a token are side by side, in rows at multiples of 16 bytes."""
    in_boxes: bool = True
    """Whether boxes of pages can be copied at once: each row has its own memory, at multiples of 16 bytes."""
    aligned: bool = True
    """Whether latents and rope keys are rows at multiples of 16 bytes."""
    one_page: bool = False
    """Whether each sequence has one page."""
    codes: Codes | None = None
    besides: tuple[str, ...] = ()
    """Features that the call needs and that no kernel here takes."""

    @property
    def rows(self) -> int:
        """The number of rows, of queries and heads, that attend to the keys of a sequence."""
        return self.queries * self.heads

    @staticmethod
    def of(x: PagedLatentAttention) -> Paged | None:
        """The problem of a call; None where sizes are symbols."""
        _, queries, heads, rank = x.q_latent.shape
        rope, page_size = x.q_rope.shape[3], x.latent_pages.shape[1]
        offsets = x.latent_pages.storage_offset(), x.rope_pages.storage_offset()
        places = *x.latent_pages.stride(), *x.rope_pages.stride(), *offsets
        if not all(isinstance(size, int) for size in (queries, heads, rank, rope, page_size, *places)):
            return None
        asked = {
            "a mask": x.mask is not None,
            "results that do not depend on the batch": x.split_tokens is not None,
            "queries that are not the last tokens": x.first_positions is not None,
        }
        besides = tuple(name for name, is_asked in asked.items() if is_asked)
        causal = x.causal and queries > 1
        codes = None
        if x.latent_scales is not None:
            of_ropes = x.rope_pages.dtype == x.latent_pages.dtype
            codes = Codes(x.latent_pages.dtype, x.latent_scales.shape[2], of_ropes)
        one_row = not besides and codes is None and whole_rows(x.latent_pages, x.rope_pages)
        return Paged(
            x.q_latent.dtype,
            queries,
            heads,
            (rank, rope),
            page_size,
            causal,
            one_row,
            is_in_boxes(x.latent_pages) and is_in_boxes(x.rope_pages),
            is_aligned(x.latent_pages) and is_aligned(x.rope_pages),
            always(x.block_table.shape[1] == 1),
            codes,
            besides,
        )


@dataclass(frozen=True)
class Takes:
    """The calls that an implementation takes."""

    dtypes: tuple[torch.dtype, ...]
    widths: tuple[int, int]
    """L and R."""
    page_sizes: tuple[int, ...] = ()
    """Any size, if empty."""
    one_row: bool = True
    """Whether it requires latent and rope key of a token side by side."""
    most_queries: int | None = None
    codes: bool = False
    """Whether latents may be codes."""

    def refusal(self, problem: Paged) -> str | None:
        """Why it does not take a problem; None where it does."""
        besides = problem.besides
        if problem.codes is not None and not self.codes:
            besides = ("FP8 pages", *besides)
        if besides:
            return f"does not take {' and '.join(besides)}"
        if problem.dtype not in self.dtypes:
            return f"takes {' and '.join(map(_short, self.dtypes))}, found {_short(problem.dtype)}"
        if problem.widths != self.widths:
            return f"takes L, R = {self.widths[0]}, {self.widths[1]}, found {problem.widths[0]}, {problem.widths[1]}"
        if self.page_sizes and problem.page_size not in self.page_sizes:
            return f"takes pages of {' or '.join(map(str, self.page_sizes))} tokens, found {problem.page_size}"
        if self.most_queries is not None and problem.queries > self.most_queries:
            return f"takes {self.most_queries} query token{'s' * (self.most_queries > 1)}, found {problem.queries}"
        if self.one_row and not problem.one_row:
            return "takes latent and rope key in one row at multiples of 16 bytes, found another layout"
        return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layout_of(x: PagedLatentAttention) -> Hashable:
    """Everything about the arguments that a choice may depend on."""
    both = x.latent_pages, x.rope_pages
    rows = whole_rows(*both), *map(is_in_boxes, both), *map(is_aligned, both)
    asked = x.causal, x.split_tokens is None, x.first_positions is None, rows
    tensors = x.q_latent, x.q_rope, x.latent_pages, x.rope_pages, x.block_table, x.seq_lens, x.latent_scales, x.mask
    return asked, *map(layout, tensors)


def sizes_of(x: PagedLatentAttention) -> tuple[int, ...]:
    """The batch size, and how many tokens a sequence may have."""
    return x.q_latent.shape[0], x.pages.capacity


def whole_rows(latent: Tensor, rope: Tensor) -> bool:
    """Whether pages `[pages, page_size, L]` and `[pages, page_size, R]` are columns of the same rows, in this order."""
    same = latent.untyped_storage()._cdata == rope.untyped_storage()._cdata
    return (
        same
        and latent.stride() == rope.stride()
        and rope.storage_offset() == latent.storage_offset() + latent.shape[2]
        and is_aligned(latent)
    )


def is_aligned(pages: Tensor) -> bool:
    """Whether the rows of pages are dense, and begin at multiples of 16 bytes."""
    apart = pages.stride()[:2]
    return (
        pages.stride(2) == 1 and all(step * pages.itemsize % ALIGNED == 0 for step in apart) and begins_aligned(pages)
    )


def is_in_boxes(pages: Tensor) -> bool:
    """Whether boxes of pages can be copied at once: each row has its own memory, at multiples of 16 bytes."""
    return min(pages.stride()) > 0 and is_aligned(pages)


def rows_of(x: PagedLatentAttention) -> Tensor:
    """The pages as `[pages, page_size, L + R]`, for a problem with `one_row`."""
    pages, page_size, rank = x.latent_pages.shape
    return x.latent_pages.as_strided((pages, page_size, rank + x.rope_pages.shape[2]), x.latent_pages.stride())


def numbers_of(x: PagedLatentAttention) -> tuple[Tensor, Tensor]:
    """Table and lengths as other projects require them: int32, dense in their last dim."""
    table = x.block_table.to(torch.int32)
    return table if table.stride(1) == 1 else table.contiguous(), x.seq_lens.to(torch.int32).contiguous()


def by_query(lse: Tensor) -> Tensor:
    """Convert log-sum-exps `[B, N, Sq]` to ours, `[B, Sq, N]` with -inf for a row that sees no key, in one launch."""
    batch, heads, queries = lse.shape
    result = lse.new_empty((batch, queries, heads))
    torch.nan_to_num(lse.transpose(1, 2), nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf, out=result)
    return result


def small(x: PagedLatentAttention) -> PagedLatentAttention:
    """Four sequences with the queries, heads, widths and dtypes of `x`, in pages of its size, or of a smaller one that
    ends within a tile of keys as far as that does; where `x` has a page for each sequence, these have too."""
    _, queries, heads, rank = x.q_latent.shape
    page_size, rope, device = x.latent_pages.shape[1], x.rope_pages.shape[2], x.q_latent.device
    page_size = min(page_size, _PAGE + page_size % _PAGE)
    if x.block_table.shape[1] == 1:
        page_size += -(-queries // _PAGE) * _PAGE  # room for the queries and more
        lengths = [queries, 0, page_size // 2 + 1, page_size]
    else:
        lengths = [queries, 0, queries + page_size // 2 + 1, queries + 2 * page_size + 3]
    most = -(-max(lengths) // page_size)
    normal = normal_like(x.q_latent)
    q = normal(len(lengths), queries, heads, rank + rope)
    rows = normal(len(lengths) * most, page_size, rank + rope)
    table = torch.arange(len(rows), device=device).flip(0).view(len(lengths), most)
    behind = torch.zeros(rows.shape[:2], dtype=torch.bool, device=device)
    for pages, length in zip(table, lengths, strict=True):
        behind[pages] = torch.arange(most * page_size, device=device).view(most, page_size) >= length
    rows = rows.masked_fill(behind[..., None], torch.nan)
    latent, scales = rows[..., :rank], None
    if x.latent_scales is not None:
        latent, scales = coded_like(latent, x.latent_pages.dtype, x.latent_scales.shape, behind)
    return dataclasses.replace(
        x,
        q_latent=q[..., :rank],
        q_rope=q[..., rank:],
        latent_pages=latent,
        rope_pages=rows[..., rank:],
        block_table=table.to(x.block_table.dtype),
        seq_lens=torch.tensor(lengths, device=device).to(x.seq_lens.dtype),
        latent_scales=scales,
        scale=(rank + rope) ** -0.5,  # scores of a variance of 1
    )


def coded_like(latent: Tensor, dtype: torch.dtype, like: torch.Size, behind: Tensor) -> tuple[Tensor, Tensor]:
    """Latents as codes with scales that broadcast as those of shape `like`; behind each end scales are NaN, and so are
    codes that can be."""
    of_tokens = [size if given > 1 else 1 for size, given in zip(latent.shape[:2], like[:2], strict=True)]
    scales = torch.rand((*of_tokens, like[2]), device=latent.device) / 32 + 1 / 64
    if scales.shape[:2] == behind.shape:
        scales = scales.masked_fill(behind[..., None], torch.nan)
    integers = not dtype.is_floating_point
    codes = (latent.float() * 32).clamp(-127, 127)
    return (codes.nan_to_num(127).round() if integers else codes).to(dtype), scales
