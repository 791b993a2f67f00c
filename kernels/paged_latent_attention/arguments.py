"""What `mla::paged_latent_attention` takes, checked."""

from __future__ import annotations

from torch import Tensor

from ...errors import KernelError
from ..checks import check_alike, check_rank, check_shapes
from ..pages import Pages, check_pages

OP = "paged_latent_attention"


def check_arguments(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    latent_scales: Tensor | None,
    split_tokens: int | None,
    mask: Tensor | None = None,
    first_positions: Tensor | None = None,
) -> None:
    """Check shapes, dtypes and devices, and on CPU lengths and pages. Raises: KernelError."""
    check_rank(OP, "q_latent", q_latent, "B Sq N L")
    check_rank(OP, "q_rope", q_rope, "B Sq N R")
    check_rank(OP, "latent_pages", latent_pages, "pages page_size L")
    check_rank(OP, "block_table", block_table, "B max_pages")
    dims = dict(zip(("B", "Sq", "N", "L"), q_latent.shape, strict=True)) | {"R": q_rope.shape[3]}
    check_shapes(OP, dims, q_rope=(q_rope, "B Sq N R"))
    cache = {} if latent_scales is not None else {"latent_pages": latent_pages, "rope_pages": rope_pages}
    check_alike(OP, q_latent=q_latent, q_rope=q_rope, **cache)
    pages = Pages(latent_pages, rope_pages, block_table, seq_lens, latent_scales)
    check_pages(OP, dims, pages, q_latent, mask, first_positions=first_positions)
    if split_tokens is not None and split_tokens < 1:
        raise KernelError(f"mla::{OP}: expected split_tokens of at least 1, found {split_tokens}")
