"""Sequences whose keys lie in pages: check the tensors that describe them, and load the keys of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import KernelError
from .checks import INTEGERS, check_mask, check_shapes
from .coded import check_coded, dequantised, is_packed, rank_of, taken
from .visibility import reads_values


@dataclass(frozen=True)
class Pages:
    """Token j of sequence b is in row `j % page_size` of page `table[b, j // page_size]`.

    latent `[pages, page_size, L]`, rope `[pages, page_size, R]`, table `[B, max_pages]`, lengths `[B]`; scales None, or
    `[pages, page_size, G]` for latents in FP8, INT8 or INT4 (then `[pages, page_size, L / 2]`), where a size of 1
    broadcasts.
    """

    latent: Tensor
    rope: Tensor
    table: Tensor
    lengths: Tensor
    scales: Tensor | None

    @property
    def page_size(self) -> int:
        return self.latent.shape[1]

    @property
    def rank(self) -> int:
        """`L`, the number of columns of a latent."""
        return rank_of(self.latent, self.scales)

    @property
    def capacity(self) -> int:
        """The most tokens that a sequence may have."""
        return self.table.shape[1] * self.page_size

    def before(self, stops: Tensor) -> Pages:
        """The same pages with each sequence cut off before a position, `[B]`."""
        return replace(self, lengths=torch.minimum(self.lengths, stops))

    def stops(self) -> list[int]:
        """For each sequence, one more than the last position to load: its length, or the capacity on a device, where
        reading the length would stall."""
        if not reads_values(self.lengths):
            return [self.capacity] * len(self.lengths)
        lengths: list[int] = self.lengths.tolist()
        return lengths

    def load(self, b: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Latents `[C, L]` and rope keys `[C, R]` of a sequence at some positions, in `dtype`.

        Positions past its last token give 0; on CPU there must be none.
        """
        behind = None if reads_values(self.lengths) else positions >= self.lengths[b]
        page, row = self.table[b].index_select(0, positions // self.page_size).long(), positions % self.page_size
        if behind is not None:
            page = page.masked_fill(behind, 0)
        latent, rope = (taken(part, lambda rows: rows[page, row]) for part in (self.latent, self.rope))
        scales = None if self.scales is None else self.scales.expand(*self.latent.shape[:2], -1)[page, row]
        latent, rope = dequantised(latent, rope, scales, dtype)
        if behind is not None:
            latent, rope = (part.masked_fill(behind[:, None], 0.0) for part in (latent, rope))
        return latent, rope

    def seen(self, b: int, positions: Tensor, queries: int, start: Tensor | None) -> Tensor:
        """Bool `[1, 1, Sq, C]`, True where a query attends to a position.

        If causal, `start` is the position of the first query.
        """
        seen = positions < self.lengths[b]
        if start is not None:
            seen = seen & (positions <= start + torch.arange(queries, device=positions.device)[:, None])
        return seen.expand(1, 1, queries, -1)


class InPages:
    """The part shared by bundles whose keys lie in pages."""

    latent_pages: Tensor
    rope_pages: Tensor
    block_table: Tensor
    seq_lens: Tensor
    latent_scales: Tensor | None

    @property
    def pages(self) -> Pages:
        """The keys as `Pages`."""
        return Pages(self.latent_pages, self.rope_pages, self.block_table, self.seq_lens, self.latent_scales)

    @property
    def like_queries(self) -> dict[str, Tensor]:
        """The pages that must have the queries' dtype: both, or none if they are coded."""
        plain = {"latent_pages": self.latent_pages, "rope_pages": self.rope_pages}
        return plain if self.latent_scales is None else {}


def mask_of(mask: Tensor | None, b: int, keys: range) -> Tensor | None:
    """The part of a mask for some keys of sequence b, `[1, N|1, Sq|1, C|1]`, arbitrary for keys that it lacks."""
    if mask is None:
        return None
    own = mask if mask.shape[0] == 1 else mask[b : b + 1]
    if own.shape[3] == 1 or keys.stop <= own.shape[3]:
        return own if own.shape[3] == 1 else own[..., keys.start : keys.stop]
    positions = torch.arange(keys.start, keys.stop, device=mask.device)
    return own.index_select(3, positions.clamp(max=own.shape[3] - 1))


def both(seen: Tensor, mask: Tensor | None) -> Tensor:
    """Combine a bool mask with a mask of any kind."""
    if mask is None:
        return seen
    return seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def check_pages(
    op: str,
    dims: Mapping[str, int],
    pages: Pages,
    like: Tensor,
    mask: Tensor | None,
    **counts: Tensor | None,
) -> None:
    """Check pages and mask against the sizes `B Sq N L R` and against `like`, a query.

    On CPU the lengths and the entries of the table are checked too. `counts` are further integer tensors `[B]`, by
    name. Raises: KernelError.
    """
    dims = dict(dims) | {"pages": pages.latent.shape[0], "page_size": pages.page_size}
    dims["max_pages"] = pages.table.shape[1]
    dims["L/2"] = dims["L"] // 2
    check_shapes(
        op,
        dims,
        latent_pages=(pages.latent, f"pages page_size {'L/2' if is_packed(pages.latent, pages.scales) else 'L'}"),
        rope_pages=(pages.rope, "pages page_size R"),
        block_table=(pages.table, "B max_pages"),
        seq_lens=(pages.lengths, "B"),
    )
    if pages.scales is not None:
        names = ("latent_pages", "rope_pages")
        check_coded(op, like, names, (pages.latent, pages.rope), "pages page_size", pages.scales)
    integers = {"block_table": pages.table, "seq_lens": pages.lengths}
    for name, count in counts.items():
        if count is not None:
            check_shapes(op, dims, **{name: (count, "B")})
            integers[name] = count
    device = like.device
    for name, tensor in integers.items():
        if tensor.dtype not in INTEGERS:
            raise KernelError(f"mla::{op}: expected {name} of torch.int32 or torch.int64, found {tensor.dtype}")
        if tensor.device != device:
            raise KernelError(f"mla::{op}: expected {name} on {device}, found {tensor.device}")
    if pages.page_size < 1:
        raise KernelError(f"mla::{op}: expected a page_size of at least 1, found {pages.page_size}")
    if mask is not None:
        check_mask(op, mask, (dims["B"], dims["N"], dims["Sq"], mask.shape[-1]), device)
    if pages.table.is_cpu:
        _check_values(op, pages, mask)


def _check_values(op: str, pages: Pages, mask: Tensor | None) -> None:
    """Check lengths and page numbers. Only called on CPU: elsewhere reading values would stall the device."""
    lengths, count = pages.lengths.tolist(), pages.latent.shape[0]
    for b, (table, length) in enumerate(zip(pages.table, lengths, strict=True)):
        if not 0 <= length <= pages.capacity:
            raise KernelError(
                f"mla::{op}: expected lengths from 0 to max_pages * page_size = {pages.capacity}, "
                f"found seq_lens[{b}] = {length}"
            )
        used = table[: -(-length // pages.page_size)]
        wrong = (used < 0) | (used >= count)
        if wrong.any():
            column = int(wrong.nonzero()[0])
            raise KernelError(
                f"mla::{op}: expected pages from 0 to {count - 1} in block_table, "
                f"found block_table[{b}, {column}] = {int(used[column])} for a sequence of {length} tokens"
            )
    if mask is not None and mask.shape[-1] != 1 and lengths and max(lengths) > mask.shape[-1]:
        raise KernelError(
            f"mla::{op}: expected a mask over at least seq_lens.max() = {max(lengths)} keys, found {list(mask.shape)}"
        )
