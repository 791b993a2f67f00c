"""Paged absorbed MLA on Hopper and Blackwell, in Gluon: launch `key_rows`, `warp_groups`, `coded_key_rows`,
`coded_warp_groups` or `tensor_memory`, then `combine` what was cut.

q_latent [B, Sq, N, 512], q_rope [B, Sq, N, 64]
latents [pages, page_size, 512], rope keys [pages, page_size, 64]
block_table [B, max_pages], seq_lens [B]

Latents and rope keys are bfloat16; for `coded_key_rows` and `coded_warp_groups` latents are FP8 or INT8, with 1, 2 or
4 scales a token. A page has a multiple of 64 tokens; if each sequence has one page, any number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
    raise ImportError(f"expected Triton 3.6 or newer, as Gluon was another language, found {triton.__version__}")

from .._common.addresses import aligned
from .._common.combine import combine
from .._common.launch import LEAST_TILES
from .._common.machine import Machine, present
from .._common.parts import Work, combination, lengths_at_a_time, shared_out
from .._common.plans import Plans, layout
from .arguments import PagedLatentAttention
from .clusters import boxes_in
from .coded_key_rows import attend_pages as attend_coded_key_rows
from .coded_warp_groups import attend_pages as attend_by_coded_warp_groups
from .key_rows import BOX, RANK
from .key_rows import attend_pages as attend_key_rows
from .taken import RECORD, TILE, share_out
from .tensor_memory import ROWS
from .tensor_memory import attend_pages as attend_in_tensor_memory
from .warp_groups import HALF
from .warp_groups import attend_pages as attend_by_warp_groups

_PAGE, _RANK, _RECORD, _ROPE = TILE.value, RANK.value, RECORD.value, BOX.value
_FEWEST, _FEW = 16, 32
"""Rows of a program of `key_rows`; `coded_key_rows` has the first."""
_MOST = _FEW
"""The most rows of a sequence that `key_rows` takes."""
_MOST_CODED = _FEWEST
"""The most that `coded_key_rows` takes."""
LAUNCHED = {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True}
_MANY_PARTS = 16
"""From so many parts of a sequence on, what combines them is launched when the last is done. Else it is launched
before, and starts on whatever multiprocessors are free first, which suits a few quick programs. On an H200 a sequence
of 32,768 takes 28.4 us late and 31.7 early, and 64 of 8,192 take 165.8 and 163.3."""


@dataclass(frozen=True)
class Plan:
    """How a call is launched."""

    work: Work
    kernel: Any
    box: int
    """Columns of latents that the kernel loads at a time, or words of two codes."""
    constants: dict[str, Any]
    blocks: int
    """Thread blocks of a program."""
    own: tuple[int, ...]
    """Numbers that all three launches take: the batch, the parts, and what a sequence takes besides its keys."""
    combining_grid: tuple[int]
    combining: dict[str, Any]


_PLANS = Plans[Plan]()


def paged_latent_attention_gluon(
    x: PagedLatentAttention, machine: Machine | None = None, blocks: int = 1
) -> tuple[Tensor, Tensor]:
    """o and lse, on a machine (by default the present one), for problems that the implementation's `Takes` accepts.

    With 2 `blocks` (on sm_90, without codes, for more than 32 rows) each program is a cluster of two thread blocks.
    """
    machine = machine or present(x.q_latent.device)
    batch, queries, heads, _ = x.q_latent.shape
    q_latent, q_rope = aligned(x.q_latent), aligned(x.q_rope)  # else they would be loaded one number at a time
    o, lse = results_for(q_latent)
    if lse.numel() == 0 or x.latent_pages.numel() == 0 or x.block_table.numel() == 0:
        return o.zero_(), lse.fill_(-torch.inf)
    codes = None if x.latent_scales is None else x.latent_pages.dtype
    groups = 0 if x.latent_scales is None else x.latent_scales.shape[2]
    key = machine, layout(q_latent), codes, groups, blocks
    plan = _PLANS.get(key, lambda: plan_of(machine, batch, queries * heads, codes, groups, blocks))
    lengths, tokens = x.seq_lens.contiguous(), x.pages.capacity
    shared = Shared(plan, lse, lengths, queries, heads, tokens)
    latents = x.latent_pages
    scales, scale_strides = [], []
    if x.latent_scales is not None:
        latents = latents.view(torch.int16)
        of_tokens = x.latent_scales.expand(*latents.shape[:2], -1)
        scales, scale_strides = [of_tokens], [*of_tokens.stride()]
    boxes = (
        TensorDescriptor(pages, list(pages.shape), list(pages.stride()), [1, _PAGE, width], boxes_in(plan.blocks))
        for pages, width in ((latents, plan.box), (x.rope_pages, _ROPE))
    )
    plan.kernel[(plan.work.programs,)](
        *(q_latent, q_rope, *boxes, *scales, x.block_table, lengths, shared.pieces, o, lse, *shared.partial),
        *(x.scale, queries, heads, tokens, plan.own[2], triton.cdiv(latents.shape[1], _PAGE)),
        *(*q_latent.stride()[:3], *q_rope.stride()[:3], *scale_strides, *x.block_table.stride()),
        CAUSAL=x.causal and queries > 1,  # a single query sees all keys of its sequence
        num_ctas=plan.blocks,
        **plan.constants,
        **LAUNCHED,
    )
    shared.combine(o, lse)
    return o, lse


def paged_latent_attention_in_clusters(x: PagedLatentAttention) -> tuple[Tensor, Tensor]:
    """The same by programs of two thread blocks."""
    return paged_latent_attention_gluon(x, blocks=2)


def results_for(q_latent: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for o and lse."""
    o = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    return o, q_latent.new_empty(q_latent.shape[:3], dtype=torch.float32)


class Shared:
    """Keys of sequences of some lengths, shared out among programs, whose sums are combined later."""

    def __init__(self, plan: Plan, lse: Tensor, lengths: Tensor, queries: int, heads: int, tokens: int) -> None:
        self.plan, self.lengths, self.numbers = plan, lengths, (queries, heads, tokens)
        work = plan.work
        self.partial = [lse] * 3
        """Sums, greatest scores and sums of weights of sequences that are cut."""
        if work.slots:
            self.partial = [lse.new_empty(size) for size in ((work.slots, _RANK), work.slots, work.slots)]
        self.pieces = torch.empty((work.parts, _RECORD), dtype=torch.int32, device=lse.device)
        """What each program takes."""
        share_out[(work.parts,)](
            *(self.pieces, lengths, queries, tokens, *plan.own),
            LEAST=LEAST_TILES,
            SIZE=_PAGE,
            LENGTHS=lengths_at_a_time(plan.own[0]),
            num_warps=4,
            enable_fp_fusion=True,
        )

    def combine(self, o: Tensor, lse: Tensor) -> None:
        """Write the results of sequences that are cut."""
        if self.plan.work.slots:
            batch, parts, own = self.plan.own
            combine[self.plan.combining_grid](
                *(*self.partial, self.lengths, self.lengths, o, lse, *self.numbers, 0, batch, parts, 0, own),
                **self.plan.combining,
            )


def plan_of(machine: Machine, batch: int, rows: int, codes: torch.dtype | None, groups: int, blocks: int = 1) -> Plan:
    """How sequences to which so many rows attend are shared out, and by which kernel."""
    kernel, tile, programs, box = attend_by_warp_groups, _PAGE, 1, HALF.value
    constants: dict[str, Any] = {"BLOCKS": blocks}
    if machine.arch != "sm_90":  # two programs take half of the columns each
        kernel, tile, programs, constants = attend_in_tensor_memory, ROWS.value, 2, {}
    elif codes is not None:
        kernel, tile, box = attend_coded_key_rows, _FEWEST, BOX.value
        constants = {"GROUPS": groups, "INT8": codes == torch.int8}
        if rows > _MOST_CODED:
            kernel, tile = attend_by_coded_warp_groups, _FEW if rows <= _FEW else _PAGE
            constants["ROWS"] = tile
    elif rows <= _MOST:
        kernel, tile, box = attend_key_rows, _FEWEST if rows <= _FEWEST else _FEW, BOX.value
        constants = {"ROWS": tile}
    # What a sequence takes besides its keys (reading queries and writing sums), in tiles of keys.
    key_bytes = 2 * (_RANK + _ROPE)
    own = tile * (key_bytes + 4 * _RANK / programs) / key_bytes / _PAGE
    work = shared_out(batch, rows, triton.cdiv(rows, tile * blocks) * programs, machine.processors // blocks, own)
    combining = combination(work, rows, _RANK, machine.processors)
    constants["LATE"] = work.most_parts >= _MANY_PARTS
    common = {"SOURCE": "pages", "CAUSAL": False, "STARTS": False, "SHARED": True, "L": _RANK, "KEYS": _PAGE}
    return Plan(
        work,
        kernel,
        box,
        constants,
        blocks,
        (work.batch, work.parts, work.own),
        (work.combined * triton.cdiv(rows, combining["ROWS"]) * combining["SPREAD"],),
        common
        | {
            "LEAST": LEAST_TILES,
            "LENGTHS": lengths_at_a_time(batch),
            "FOLLOWS": True,
            **combining,
            **LAUNCHED,
        },
    )
