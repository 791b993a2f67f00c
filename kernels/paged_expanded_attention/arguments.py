"""What `mla::paged_expanded_attention` takes, checked."""

from __future__ import annotations

from torch import Tensor

from ...errors import KernelError
from ..checks import check_alike, check_rank, check_shapes
from ..expanded_attention.chunks import check_workspace
from ..pages import Pages, check_pages

OP = "paged_expanded_attention"


def check_arguments(
    q: Tensor,
    pages: Pages,
    w_uk: Tensor,
    w_uv: Tensor,
    workspace_tokens: int,
    mask: Tensor | None,
    first_positions: Tensor | None,
    query_lens: Tensor | None,
) -> None:
    """Check shapes, dtypes and devices, and on CPU lengths and pages. Raises: KernelError."""
    check_rank(OP, "q", q, "B Sq N P+R")
    check_rank(OP, "latent_pages", pages.latent, "pages page_size L")
    check_rank(OP, "rope_pages", pages.rope, "pages page_size R")
    check_rank(OP, "block_table", pages.table, "B max_pages")
    check_rank(OP, "w_uk", w_uk, "N P L")
    check_rank(OP, "w_uv", w_uv, "N V L")
    dims = dict(zip(("B", "Sq", "N"), q.shape, strict=False))
    dims |= {"L": pages.latent.shape[2], "R": pages.rope.shape[2], "P": w_uk.shape[1], "V": w_uv.shape[1]}
    dims["P+R"] = dims["P"] + dims["R"]
    check_shapes(OP, dims, q=(q, "B Sq N P+R"), w_uk=(w_uk, "N P L"), w_uv=(w_uv, "N V L"))
    cache = {} if pages.scales is not None else {"latent_pages": pages.latent, "rope_pages": pages.rope}
    check_alike(OP, q=q, w_uk=w_uk, w_uv=w_uv, **cache)
    check_pages(OP, dims, pages, q, mask, first_positions=first_positions, query_lens=query_lens)
    check_workspace(OP, workspace_tokens)
    if query_lens is not None and query_lens.is_cpu:
        for b, count in enumerate(query_lens.tolist()):
            if not 0 <= count <= dims["Sq"]:
                raise KernelError(
                    f"mla::{OP}: expected query_lens from 0 to Sq = {dims['Sq']}, found query_lens[{b}] = {count}"
                )
