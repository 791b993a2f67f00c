"""What `mla::paged_latent_attention` takes, checked."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import KernelError
from ..checks import check_alike, check_mask, check_rank, check_shapes
from ..fp8 import check_fp8

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
    dims = dict(zip(("B", "Sq", "N", "L"), q_latent.shape, strict=True))
    dims |= {"R": q_rope.shape[3], "pages": latent_pages.shape[0], "page_size": latent_pages.shape[1]}
    dims["max_pages"] = block_table.shape[1]
    check_shapes(
        OP,
        dims,
        q_rope=(q_rope, "B Sq N R"),
        latent_pages=(latent_pages, "pages page_size L"),
        rope_pages=(rope_pages, "pages page_size R"),
        block_table=(block_table, "B max_pages"),
        seq_lens=(seq_lens, "B"),
    )
    if latent_scales is None:
        check_alike(OP, q_latent=q_latent, q_rope=q_rope, latent_pages=latent_pages, rope_pages=rope_pages)
    else:
        names = ("latent_pages", "rope_pages")
        check_fp8(OP, (q_latent, q_rope), names, (latent_pages, rope_pages), "pages page_size", latent_scales)
    integers = {"block_table": block_table, "seq_lens": seq_lens}
    if first_positions is not None:
        check_shapes(OP, dims, first_positions=(first_positions, "B"))
        integers["first_positions"] = first_positions
    for name, tensor in integers.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise KernelError(f"mla::{OP}: expected {name} of torch.int32 or torch.int64, found {tensor.dtype}")
        if tensor.device != q_latent.device:
            raise KernelError(f"mla::{OP}: expected {name} on {q_latent.device}, found {tensor.device}")
    if dims["page_size"] < 1:
        raise KernelError(f"mla::{OP}: expected a page_size of at least 1, found {dims['page_size']}")
    if split_tokens is not None and split_tokens < 1:
        raise KernelError(f"mla::{OP}: expected split_tokens of at least 1, found {split_tokens}")
    if mask is not None:
        check_mask(OP, mask, (dims["B"], dims["N"], dims["Sq"], mask.shape[-1]), q_latent.device)
    if block_table.is_cpu:
        _check_values(block_table, seq_lens, latent_pages.shape[0], latent_pages.shape[1])
        if mask is not None and mask.shape[-1] != 1 and len(seq_lens) and int(seq_lens.max()) > mask.shape[-1]:
            raise KernelError(
                f"mla::{OP}: expected a mask over at least seq_lens.max() = {int(seq_lens.max())} keys, "
                f"found {list(mask.shape)}"
            )


def _check_values(block_table: Tensor, seq_lens: Tensor, pages: int, page_size: int) -> None:
    """Only on CPU: elsewhere looking at values stalls the device."""
    capacity = block_table.shape[1] * page_size
    for b, (table, length) in enumerate(zip(block_table, seq_lens.tolist(), strict=True)):
        if not 0 <= length <= capacity:
            raise KernelError(
                f"mla::{OP}: expected lengths from 0 to max_pages * page_size = {capacity}, "
                f"found seq_lens[{b}] = {length}"
            )
        used = table[: -(-length // page_size)]
        wrong = (used < 0) | (used >= pages)
        if wrong.any():
            column = int(wrong.nonzero()[0])
            raise KernelError(
                f"mla::{OP}: expected pages from 0 to {pages - 1} in block_table, "
                f"found block_table[{b}, {column}] = {int(used[column])} for a sequence of {length} tokens"
            )
