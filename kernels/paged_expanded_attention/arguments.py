"""The arguments of `mla::paged_expanded_attention` and their checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import KernelError
from ..checks import check_alike, check_rank, check_shapes
from ..expanded_attention.arguments import check_workspace
from ..pages import InPages, check_pages
from ..two_latents import check_ranks

OP = "paged_expanded_attention"


@dataclass(frozen=True)
class PagedExpandedAttention(InPages):
    """The arguments; see `mla_compile.ops` for shapes and dtypes."""

    q: Tensor
    latent_pages: Tensor
    rope_pages: Tensor
    block_table: Tensor
    seq_lens: Tensor
    w_uk: Tensor
    w_uv: Tensor
    causal: bool
    scale: float
    workspace_tokens: int
    latent_scales: Tensor | None = None
    mask: Tensor | None = None
    first_positions: Tensor | None = None
    query_lens: Tensor | None = None

    @property
    def counts(self) -> Tensor | int:
        """How many queries of each sequence are not padding: `[B]`, or one number for all."""
        return self.q.shape[1] if self.query_lens is None else self.query_lens

    @property
    def starts(self) -> Tensor:
        """The position of the first query of each sequence, `[B]`."""
        return self.seq_lens - self.counts if self.first_positions is None else self.first_positions

    @property
    def padding(self) -> Tensor | None:
        """Which queries are padding, bool `[B, Sq]`; None if none is."""
        if self.query_lens is None:
            return None
        return torch.arange(self.q.shape[1], device=self.q.device) >= self.query_lens[:, None]

    def check(self) -> None:
        """Check shapes, dtypes and devices, and on CPU the lengths and pages. Raises: KernelError."""
        q, w_uk, w_uv = self.q, self.w_uk, self.w_uv
        check_rank(OP, "q", q, "B Sq N P+R")
        check_rank(OP, "latent_pages", self.latent_pages, "pages page_size L")
        check_rank(OP, "rope_pages", self.rope_pages, "pages page_size R")
        check_rank(OP, "block_table", self.block_table, "B max_pages")
        check_rank(OP, "w_uk", w_uk, "N P L")
        check_rank(OP, "w_uv", w_uv, "N V L")
        dims = dict(zip(("B", "Sq", "N"), q.shape, strict=False))
        dims |= {"L": self.pages.rank, "R": self.rope_pages.shape[2]}
        dims |= {"P": w_uk.shape[1], "V": w_uv.shape[1], "P+R": w_uk.shape[1] + dims["R"]}
        dims |= check_ranks(OP, dims["L"], w_uk, w_uv)
        check_shapes(OP, dims, q=(q, "B Sq N P+R"), w_uk=(w_uk, "N P Lk"), w_uv=(w_uv, "N V Lv"))
        check_alike(OP, q=q, w_uk=w_uk, w_uv=w_uv, **self.like_queries)
        counts = {"first_positions": self.first_positions, "query_lens": self.query_lens}
        check_pages(OP, dims, self.pages, q, self.mask, **counts)
        check_workspace(OP, self.workspace_tokens)
        if self.query_lens is not None and self.query_lens.is_cpu:
            for b, count in enumerate(self.query_lens.tolist()):
                if not 0 <= count <= dims["Sq"]:
                    raise KernelError(
                        f"mla::{OP}: expected query_lens from 0 to Sq = {dims['Sq']}, found query_lens[{b}] = {count}"
                    )


def zero(result: tuple[Tensor, Tensor], padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """o and lse, set to 0 and -inf for queries that are padding."""
    if padding is None:
        return result
    o, lse = result
    return o.masked_fill(padding[..., None, None], 0.0), lse.masked_fill(padding[..., None], -torch.inf)
