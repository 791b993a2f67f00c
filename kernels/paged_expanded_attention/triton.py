"""Chunked MLA over pages on a GPU: `kernel` gathers a chunk, and `expanded_attention` does all else.

    latent_pages [pages, page_size, L], rope_pages [pages, page_size, R]   any strides but 1 in the last dim
    block_table [B, max_pages], seq_lens, first_positions and query_lens [B]

Chunks cover all positions that the table has room for, because only the device knows the lengths. Gathering is cheap:
a few bytes per key, against the thousands of operations of the key's up-projection.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .._common.launch import coded_constants, strides_of
from .._common.machine import Machine
from .._common.plans import Plans, layout
from .._common.tiles import Tiles, columns, power_of_two
from ..coded import bytes_of
from ..expanded_attention.triton import BatchKeys, Chunk, Lengths, attend_in_chunks
from ..pages import Pages
from .arguments import PagedExpandedAttention
from .kernel import gather_chunk

GATHERED = 16
"""Positions per program: 9,216 elements of DeepSeek's rows, 36 per thread and load of 256 columns in 4 warps."""
WARPS = 4
PLANS = Plans[dict[str, Any]]()
"""The constants of the gathering kernel, by machine and layout of the pages."""


def paged_expanded_attention_triton(
    x: PagedExpandedAttention, machine: Machine, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """o and lse, on a machine."""
    pages = x.pages
    rank, rope = pages.rank, pages.rope.shape[2]
    starts, stops = x.starts if x.causal else None, pages.lengths
    if starts is not None and x.first_positions is not None:
        stops = torch.minimum(stops, starts + x.counts)  # keys after the last query may hold anything
    starts, counts = (t if t is None else t.contiguous() for t in (starts, x.query_lens))
    lengths, stops = Lengths(pages.lengths.contiguous(), starts, counts), stops.contiguous()
    key = machine, *map(layout, (pages.latent, pages.rope, pages.scales))
    constants = PLANS.get(key, lambda: constants_of(machine, pages))

    def take(part: slice, chunk: Chunk, workspace: Tensor) -> tuple[Tensor, Tensor]:
        table, count = pages.table[part], chunk.stop - chunk.start
        rows = len(table) * count
        latent_out = workspace[: rows * rank].view(len(table), count, rank)
        rope_out = workspace[rows * rank : rows * (rank + rope)].view(len(table), count, rope)
        gather_chunk[(len(table) * triton.cdiv(count, GATHERED),)](
            *(bytes_of(part) for part in (pages.latent, pages.rope)),
            workspace if pages.scales is None else pages.scales,
            table,
            stops[part],
            latent_out,
            rope_out,
            chunk.start,
            count,
            pages.page_size,
            *pages.latent.stride()[:2],
            *pages.rope.stride()[:2],
            *strides_of(pages.scales, 3),
            *table.stride(),
            **constants,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
        return latent_out, rope_out[:, :, None]

    keys = BatchKeys(pages.capacity, rope, take, copied=rank + rope, lengths=lengths)
    return attend_in_chunks(x, keys, machine, tiles)


def constants_of(machine: Machine, pages: Pages) -> dict[str, Any]:
    """The constants that the gathering kernel is specialised to."""
    rank, rope = pages.rank, pages.rope.shape[2]
    first, second = columns(rank)
    return {
        "L": rank,
        "R": rope,
        "A": first,
        "B": second,
        "ROPE": power_of_two(rope) if rope else 0,
        **coded_constants(machine, rank, pages.latent, pages.rope, pages.scales),
        "KEYS": GATHERED,
    }
