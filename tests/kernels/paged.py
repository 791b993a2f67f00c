"""A latent cache in pages that are in no order, as in a pool that has served many sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_compile.fp8 import FP8
from mla_compile.int4 import PACKED, packed
from mla_compile.int8 import INT8


@dataclass(frozen=True)
class Paged:
    """q_latent `[B, Sq, N, L]`, q_rope `[B, Sq, N, R]`, pool `[pages, page_size, L + R]`, block_table, seq_lens."""

    q_latent: Tensor
    q_rope: Tensor
    pool: Tensor
    block_table: Tensor
    seq_lens: Tensor
    scale: float

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """What `mla::paged_latent_attention` takes before `causal` and `scale`."""
        rank = self.q_latent.shape[3]
        return (
            self.q_latent,
            self.q_rope,
            self.pool[..., :rank],
            self.pool[..., rank:],
            self.block_table,
            self.seq_lens,
        )

    def double(self) -> Paged:
        return replace(self, q_latent=self.q_latent.double(), q_rope=self.q_rope.double(), pool=self.pool.double())


def make_paged(
    lengths: list[int],
    sizes: tuple[int, int, int, int],
    page_size: int,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int32,
    spare_pages: int = 2,
) -> Paged:
    """Sequences of the given lengths and sizes `Sq, N, L, R`, in pages assigned at random.

    Unused pages and rows hold NaN. The table is a range of columns of a wider one; its unused entries are no pages.
    """
    queries, heads, rank, rope = sizes
    per_sequence = [-(-length // page_size) for length in lengths]
    width = max(per_sequence) + spare_pages
    order = torch.randperm(sum(per_sequence) + spare_pages)
    pool = torch.full((len(order), page_size, rank + rope), torch.nan, dtype=dtype)
    table = torch.full((len(lengths), width + 3), -(2**30), dtype=index)[:, 1:-2]
    for b, (length, pages) in enumerate(zip(lengths, per_sequence, strict=True)):
        mine = order[sum(per_sequence[:b]) :][:pages]
        table[b, :pages] = mine
        positions = torch.arange(length)
        pool[mine[positions // page_size], positions % page_size] = torch.randn(length, rank + rope, dtype=dtype)
    q = torch.randn(len(lengths), queries, heads, rank + rope, dtype=dtype)
    scale = (rank + rope) ** -0.5
    return Paged(q[..., :rank], q[..., rank:], pool, table, torch.tensor(lengths, dtype=index), scale)


MOST = {FP8: 448, INT8: 127, PACKED: 7}
CODED = [(4, False, FP8), (1, False, FP8), (1, True, FP8), (1, False, INT8), (1, True, INT8), (4, False, PACKED)]
"""Arguments of `quantised`: the number of scales per latent, whether rope keys are coded too, and the dtype."""


def coded_numbers(numbers: Tensor, coded: torch.dtype) -> Tensor:
    """Numbers rounded to FP8, INT8 or, two in a byte, INT4."""
    if coded == PACKED:
        return packed(numbers.nan_to_num().round().to(INT8))
    return (numbers.round() if coded == INT8 else numbers).to(coded)


def quantised(
    x: Paged, groups: int, rope_too: bool = False, coded: torch.dtype = FP8
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The arguments with latents in FP8, INT8 or INT4, and the scales.

    Latents, scales and rope keys are views of one pool of bytes. A row is the coded latent, a float32 scale for each of
    `groups` groups of columns, and the rope key in its own dtype. With `rope_too`, the rope key is coded as well, with
    one scale for everything, and the tensors are apart.
    """
    rank = x.q_latent.shape[3]
    pool = x.pool.float()
    latent, k_rope = pool[..., :rank], pool[..., rank:]
    if rope_too:
        assert groups == 1
        scales = (pool.nan_to_num().abs().amax() / MOST[coded]).reshape(1, 1, 1)
        return (
            *x.arguments[:2],
            coded_numbers(latent / scales, coded),
            coded_numbers(k_rope / scales, coded),
            *x.arguments[4:],
        ), scales
    grouped = latent.unflatten(2, (groups, -1))
    scales = grouped.abs().amax(-1) / MOST[coded]
    values = coded_numbers((grouped / scales[..., None]).flatten(2), coded)
    itemsize, columns = x.pool.dtype.itemsize, values.shape[2]
    start = columns + -columns % 4
    row = start + 4 * groups + itemsize * k_rope.shape[2]
    rows = torch.zeros(*pool.shape[:2], row + -row % 4, dtype=torch.uint8)
    views = (
        rows[..., :columns].view(coded),
        rows[..., start : start + 4 * groups].view(torch.float32),
        rows[..., start + 4 * groups : row].view(x.pool.dtype),
    )
    for view, content in zip(views, (values, scales, x.pool[..., rank:]), strict=True):
        view.copy_(content)
    return (*x.arguments[:2], views[0], views[2], *x.arguments[4:]), views[1]


@dataclass(frozen=True)
class PagedHeads:
    """The cache of a `Paged` (its `arguments` from the pages on), with q `[B, Sq, N, P + R]`, w_uk and w_uv."""

    q: Tensor
    cache: tuple[Tensor, ...]
    w_uk: Tensor
    w_uv: Tensor
    scale: float
    scales: Tensor | None = None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """What `mla::paged_expanded_attention` takes before `causal` and `scale`."""
        return (self.q, *self.cache, self.w_uk, self.w_uv)

    def with_two_latents(self, of_keys: int) -> PagedHeads:
        """The same, but keys come from the first columns of the latent, and values from the others."""
        return replace(self, w_uk=self.w_uk[..., :of_keys], w_uv=self.w_uv[..., of_keys:])

    def double(self) -> PagedHeads:
        dtype = self.q.dtype
        cache = tuple(t.double() if t.dtype == dtype else t for t in self.cache)
        return replace(self, q=self.q.double(), cache=cache, w_uk=self.w_uk.double(), w_uv=self.w_uv.double())


def make_paged_heads(
    lengths: list[int],
    sizes: tuple[int, int, int, int, int, int],
    page_size: int,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int32,
    groups: int | None = None,
    rope_too: bool = False,
    coded: torch.dtype = FP8,
) -> PagedHeads:
    """As `make_paged`, for sizes `Sq, N, L, P, R, V`; if `groups` is given, `quantised` codes the cache."""
    queries, heads, rank, nope, rope, value = sizes
    x = make_paged(lengths, (queries, heads, rank, rope), page_size, dtype, index)
    q = torch.randn(len(lengths), heads, queries, nope + rope, dtype=dtype).transpose(1, 2)
    weight = torch.randn(heads, nope + value, rank, dtype=dtype) / rank**0.5
    arguments, scales = (x.arguments, None) if groups is None else quantised(x, groups, rope_too, coded)
    return PagedHeads(q, arguments[2:], weight[:, :nope], weight[:, nope:], (nope + rope) ** -0.5, scales)
