"""The arguments of `mla::paged_latent_attention` and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...errors import KernelError
from ..checks import check_alike, check_rank, check_shapes
from ..pages import InPages, check_pages

OP = "paged_latent_attention"


@dataclass(frozen=True)
class PagedLatentAttention(InPages):
    """The arguments; see `mla_compile.ops` for shapes and dtypes."""

    q_latent: Tensor
    q_rope: Tensor
    latent_pages: Tensor
    rope_pages: Tensor
    block_table: Tensor
    seq_lens: Tensor
    causal: bool
    scale: float
    latent_scales: Tensor | None = None
    split_tokens: int | None = None
    mask: Tensor | None = None
    first_positions: Tensor | None = None

    @property
    def starts(self) -> Tensor:
        """The position of the first query of each sequence, `[B]`."""
        return self.seq_lens - self.q_latent.shape[1] if self.first_positions is None else self.first_positions

    def check(self) -> None:
        """Check shapes, dtypes and devices, and on CPU the lengths and pages. Raises: KernelError."""
        check_rank(OP, "q_latent", self.q_latent, "B Sq N L")
        check_rank(OP, "q_rope", self.q_rope, "B Sq N R")
        check_rank(OP, "latent_pages", self.latent_pages, "pages page_size L")
        check_rank(OP, "block_table", self.block_table, "B max_pages")
        dims = dict(zip(("B", "Sq", "N", "L"), self.q_latent.shape, strict=True)) | {"R": self.q_rope.shape[3]}
        check_shapes(OP, dims, q_rope=(self.q_rope, "B Sq N R"))
        check_alike(OP, q_latent=self.q_latent, q_rope=self.q_rope, **self.like_queries)
        check_pages(OP, dims, self.pages, self.q_latent, self.mask, first_positions=self.first_positions)
        if self.split_tokens is not None and self.split_tokens < 1:
            raise KernelError(f"mla::{OP}: expected split_tokens of at least 1, found {self.split_tokens}")
