"""What a call of `mla::paged_latent_attention` asks, as far as another project's kernel may refuse it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..paged_latent_attention.arguments import PagedLatentAttention

ALIGNED = 16
"""Bytes of which an address and a stride have to be multiples for TMA."""


@dataclass(frozen=True)
class Problem:
    """One call, without its batch and its lengths, which no kernel here refuses."""

    dtype: torch.dtype
    """Of queries."""
    queries: int
    heads: int
    widths: tuple[int, int]
    """L and R."""
    page_size: int
    causal: bool
    one_row: bool
    """Whether latent and rope key of a token are side by side, rows at multiples of 16 bytes."""
    besides: tuple[str, ...] = ()
    """What is asked that no kernel of other projects takes here."""

    @property
    def rows(self) -> int:
        """Of queries and heads, that attend to the keys of a sequence."""
        return self.queries * self.heads

    @staticmethod
    def of(x: PagedLatentAttention) -> Problem | None:
        """That of some arguments; None where sizes are symbols."""
        _, queries, heads, rank = x.q_latent.shape
        rope, page_size = x.q_rope.shape[3], x.latent_pages.shape[1]
        places = *x.latent_pages.stride(), *x.rope_pages.stride(), x.latent_pages.storage_offset()
        if not all(isinstance(size, int) for size in (queries, heads, rank, rope, page_size, *places)):
            return None
        asked = {
            "FP8 pages": x.latent_scales is not None,
            "a mask": x.mask is not None,
            "results that do not depend on the batch": x.split_tokens is not None,
            "queries that are not the last": x.first_positions is not None,
        }
        besides = tuple(name for name, is_asked in asked.items() if is_asked)
        causal = x.causal and queries > 1
        one_row = not besides and whole_rows(x.latent_pages, x.rope_pages)
        return Problem(x.q_latent.dtype, queries, heads, (rank, rope), page_size, causal, one_row, besides)


def whole_rows(latent: Tensor, rope: Tensor) -> bool:
    """Whether pages `[pages, page_size, L]` and `[pages, page_size, R]` are columns of the same rows, in this order."""
    same = latent.untyped_storage()._cdata == rope.untyped_storage()._cdata
    first = latent.storage_offset()
    places = first, *latent.stride()[:2]
    return (
        same
        and latent.stride() == rope.stride()
        and latent.stride(2) == 1
        and rope.storage_offset() == first + latent.shape[2]
        and all(place * latent.itemsize % ALIGNED == 0 for place in places)
    )


def rows_of(x: PagedLatentAttention) -> Tensor:
    """The pages as `[pages, page_size, L + R]`, of a problem with `one_row`."""
    pages, page_size, rank = x.latent_pages.shape
    return x.latent_pages.as_strided((pages, page_size, rank + x.rope_pages.shape[2]), x.latent_pages.stride())


def numbers_of(x: PagedLatentAttention) -> tuple[Tensor, Tensor]:
    """Table and lengths as others want them: int32, dense in their last dim."""
    table = x.block_table.to(torch.int32)
    return table if table.stride(1) == 1 else table.contiguous(), x.seq_lens.to(torch.int32).contiguous()


def by_query(lse: Tensor) -> Tensor:
    """Log-sum-exps `[B, N, Sq]` as ours are, `[B, Sq, N]`, -inf of a row that sees no key, in one launch."""
    batch, heads, queries = lse.shape
    result = lse.new_empty((batch, queries, heads))
    torch.nan_to_num(lse.transpose(1, 2), nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf, out=result)
    return result
