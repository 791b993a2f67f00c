"""Plan and make the launches of attention over latents: everything that is chosen on the host.

Nothing here reads a value from the device, so launches can be captured in a CUDA graph and replayed for other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ...coded import HELD
from ...fp8 import FP8
from ..coded import is_packed
from .addresses import begins_aligned
from .combine import combine
from .kernel import attend_latents
from .launching import is_traced, launched
from .machine import Machine
from .parts import Work, combination, in_parts, lengths_at_a_time, number_of_parts, shared_out
from .plans import Plans, layout
from .sizes import always, expected, is_symbol
from .tiles import LEAST, MOST_ROWS_OF_WORDS, MaskKind, Tiles, choose, columns, fits, power_of_two
from .tuning import bucket, is_on, neighbours, tuned

LEAST_TILES = 4
"""The fewest tiles of keys in a part, so that loading ahead pays."""
MANY_TOKENS = 1 << 15
"""A cache that may grow is cut into parts for at least this many keys; parts that are not needed yet end at once."""


@dataclass(frozen=True)
class Source:
    """Where the keys are. `kernel` says which tensors are used for each kind, and how."""

    kind: str
    """`pages`, `rows` or `named`."""
    latent: Tensor
    rope: Tensor
    tokens: int
    """The most keys, or names of keys, of a group."""
    cached: int = 0
    """For named keys, the number of keys in the cache."""
    page_size: int = 1
    table: Tensor | None = None
    lengths: Tensor | None = None
    starts: Tensor | None = None
    scales: Tensor | None = None
    mask: Tensor | None = None
    causal: bool = False
    causal_offset: int = 0


def attend(
    machine: Machine,
    q_latent: Tensor,
    q_rope: Tensor,
    source: Source,
    scale: float,
    split_tokens: int | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q `[B, Sq, N, L]`, `[B, Sq, N, R]` over the keys of a source: o `[B, Sq, N, L]`, lse `[B, Sq, N]`.

    If `tiles` is None, they are the table's, or the fastest while `tuning` is on. With `split_tokens` they are always
    the table's, which do not depend on the batch, and a group's keys are cut at the same places in any batch: every
    `split_tokens`, rounded up to whole tiles.
    """
    batch, queries, heads, _ = q_latent.shape
    q_latent, q_rope = (q if q.shape[3] < 2 or q.stride(3) == 1 else q.contiguous() for q in (q_latent, q_rope))
    o = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    lse = q_latent.new_empty((batch, queries, heads), dtype=torch.float32)
    if always(lse.numel() == 0):
        return o, lse
    plan = _plan(machine, q_latent, q_rope, source, scale, split_tokens, tiles)
    unread = q_latent  # in place of missing tensors; not one that is written to, which torch would keep apart
    partial = [lse] * 3
    if plan.work.combines:
        partial = [lse.new_empty(size) for size in plan.sizes]
    lengths, starts = (unread if t is None else t for t in (source.lengths, source.starts))
    launched(attend_latents)[plan.grid](
        q_latent,
        q_rope,
        *(part.view(torch.uint8) if part.dtype == FP8 else part for part in (source.latent, source.rope)),
        unread if source.scales is None else source.scales,
        unread if source.table is None else source.table,
        lengths,
        starts,
        unread if source.mask is None else source.mask,
        o,
        lse,
        *partial,
        scale,
        *plan.numbers,
        **plan.constants,
    )
    if plan.work.combines:
        launched(combine)[plan.combining_grid](
            *partial, lengths, starts, o, lse, *plan.combining_numbers, **plan.combining_constants
        )
    return o, lse


@dataclass(frozen=True)
class _Plan:
    """Everything about a launch but its tensors and the scale."""

    work: Work
    sizes: tuple[Any, ...]
    """The sizes of the partial results."""
    grid: tuple[int]
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    """The kernel's constants and the compiler's options."""
    combining_grid: tuple[int]
    combining_numbers: tuple[int, ...]
    combining_constants: dict[str, Any]


PLANS = Plans[_Plan]()


def _plan(
    machine: Machine,
    q_latent: Tensor,
    q_rope: Tensor,
    source: Source,
    scale: float,
    split_tokens: int | None,
    tiles: Tiles | None,
) -> _Plan:
    if tiles is None and split_tokens is None and is_on():
        tiles = _tuned(machine, q_latent, q_rope, source, scale)
    if is_traced():  # planned once for all calls of the graph, with sizes that may be symbols
        return _new_plan(machine, q_latent, q_rope, source, split_tokens, tiles)
    tensors = q_latent, q_rope, source.latent, source.rope, source.table, source.scales, source.mask
    lengths = source.lengths is not None, source.starts is not None
    keys = source.kind, source.tokens, source.cached, source.page_size, source.causal, source.causal_offset
    in_words = source.scales is None or _begins_evenly(source.latent)
    key = machine, tiles, split_tokens, keys, lengths, in_words, *map(layout, tensors)
    return PLANS.get(key, lambda: _new_plan(machine, q_latent, q_rope, source, split_tokens, tiles))


def _new_plan(
    machine: Machine, q_latent: Tensor, q_rope: Tensor, source: Source, split_tokens: int | None, tiles: Tiles | None
) -> _Plan:
    _, queries, heads, rank = q_latent.shape
    rope = q_rope.shape[3]
    groups, rows = _groups_rows(q_latent, source)
    tiles = tiles or _of_table(machine, q_latent, q_rope, source)
    fixed = 0 if split_tokens is None else triton.cdiv(split_tokens, tiles.keys) * tiles.keys
    work = _work(machine, source, tiles, (groups, rows), fixed, rank, rope, q_latent.itemsize)
    shared = work.batch, work.parts, fixed, work.own
    strides = [
        *(*q_latent.stride()[:3], *q_rope.stride()[:3], *source.latent.stride()[:2], *source.rope.stride()[:2]),
        *(*strides_of(source.scales, 3), *strides_of(source.table, 3), *strides_of(source.mask, 4)),
    ]
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True}
    combining = {
        "SOURCE": source.kind,
        "CAUSAL": source.causal,
        "STARTS": source.starts is not None,
        "SHARED": work.kind == "shared",
        "L": rank,
        "KEYS": tiles.keys,
        "LEAST": LEAST_TILES,
        "LENGTHS": lengths_at_a_time(work.batch if work.kind == "shared" else 0),
        "FOLLOWS": False,
        **combination(work, rows, rank, machine.processors),
    }
    return _Plan(
        work,
        ((work.slots, rank), work.slots, work.slots),
        (work.programs,),
        (queries, heads, source.tokens, source.cached, source.causal_offset, *shared, *strides),
        constants_of(machine, q_latent, rope, source, tiles, work.kind) | options,
        (work.combined * triton.cdiv(rows, combining["ROWS"]) * combining["SPREAD"],),
        (queries, heads, source.tokens, source.causal_offset, *shared),
        combining | {"num_warps": 4, "enable_fp_fusion": True},
    )


def _groups_rows(q_latent: Tensor, source: Source) -> tuple[int, int]:
    batch, queries, heads, _ = q_latent.shape
    return (batch * queries, heads) if source.kind == "named" else (batch, queries * heads)


def _of_table(machine: Machine, q_latent: Tensor, q_rope: Tensor, source: Source) -> Tiles:
    _, rows = _groups_rows(q_latent, source)
    widths = q_latent.shape[3], q_rope.shape[3], q_latent.itemsize
    return choose(machine, expected(rows), *widths, source.scales is not None, mask_kind(source.mask))


def _tuned(machine: Machine, q_latent: Tensor, q_rope: Tensor, source: Source, scale: float) -> Tiles:
    """The fastest tiles, while tuning is on."""
    default = _of_table(machine, q_latent, q_rope, source)
    rank, rope, size = q_latent.shape[3], q_rope.shape[3], q_latent.itemsize
    constants = constants_of(machine, q_latent, rope, source, default, "whole")
    same = [
        constants[name]
        for name in ("SOURCE", "MASK", "BY_ROW", "CAUSAL", "STARTS", "PAGE", "L", "R", "CODED", "CODED_ROPE")
    ]
    grown = [bucket(number) for number in (*_groups_rows(q_latent, source), source.tokens)]
    return tuned(
        machine,
        ("attend", q_latent.dtype, *same, *grown),
        default,
        lambda: neighbours(default, lambda tiles: fits(machine, tiles, rank, rope, size)),
        lambda tiles: attend(machine, q_latent, q_rope, source, scale, tiles=tiles),
    )


def _work(
    machine: Machine,
    source: Source,
    tiles: Tiles,
    groups_rows: tuple[int, int],
    fixed: int,
    rank: int,
    rope: int,
    itemsize: int,
) -> Work:
    """Keys are shared out where lengths are on the device, unless parts are fixed; else they are cut into parts."""
    groups, rows = groups_rows
    row_tiles = triton.cdiv(rows, tiles.rows)
    key_bytes = (rank + rope) * itemsize
    row_keys = tiles.rows * (key_bytes + 4 * rank) / key_bytes
    if fixed:
        return in_parts(groups, rows, row_tiles, max(triton.cdiv(source.tokens, fixed), 1))
    if source.lengths is not None:
        return shared_out(groups, rows, row_tiles, machine.processors, row_keys / tiles.keys)
    least = LEAST_TILES * tiles.keys
    tokens = expected(source.tokens)
    if is_symbol(source.tokens):
        tokens = max(tokens, MANY_TOKENS)
    parts = number_of_parts(groups * row_tiles, tokens, least, machine.processors, row_keys)
    return in_parts(groups, rows, row_tiles, parts)


def constants_of(
    machine: Machine, q_latent: Tensor, rope: int, source: Source, tiles: Tiles, work: str
) -> dict[str, Any]:
    """The constants that the kernel is specialised to; `work` is the kind of `Work`."""
    _, queries, heads, rank = q_latent.shape
    first, second = columns(rank)
    return {
        "SOURCE": source.kind,
        "MASK": word_of(source.mask),
        "BY_ROW": mask_kind(source.mask) == "of rows",
        "CAUSAL": source.causal,
        "STARTS": source.starts is not None,
        "WORK": work,
        "WHOLE": always((heads if source.kind == "named" else queries * heads) % tiles.rows == 0),
        "PAGE": source.page_size,
        "L": rank,
        "R": rope,
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "A": first,
        "B": second,
        "ROPE": power_of_two(rope) if rope else 0,
        "LEAST": LEAST_TILES,
        "LENGTHS": lengths_at_a_time(q_latent.shape[0] if work == "shared" else 0),
        **coded_constants(machine, rank, source.latent, source.rope, source.scales),
        "WORDS": _groups_in_words(machine, q_latent, source, tiles),
        "STAGES": tiles.stages,
    }


def coded_constants(machine: Machine, rank: int, latent: Tensor, rope: Tensor, scales: Tensor | None) -> dict[str, Any]:
    """The constants that loading latents of `rank` columns, and rope keys, is specialised to."""
    first, second = columns(rank)
    group = rank if scales is None else rank // scales.shape[2]
    same = group & -group
    return {
        "CODED": numbers_in_one(latent, scales),
        "CODED_ROPE": rope.dtype in HELD,
        "ROPE_ALIGN": _align(rope),
        "NATIVE": machine.converts_fp8,
        "GROUP": group,
        "SAME_A": min(same, first),
        "SAME_B": min(same, max(second, 1)),
    }


def numbers_in_one(latent: Tensor, scales: Tensor | None) -> int:
    """How many numbers an element of coded latents holds; 0 where there are no scales."""
    return 0 if scales is None else 1 + is_packed(latent, scales)


def _groups_in_words(machine: Machine, q_latent: Tensor, source: Source, tiles: Tiles) -> int:
    """The number of scales of each token if its codes can be loaded two at a time (see `words`), else 0.

    Products of 64 rows on Hopper read their operands from shared memory, where converted numbers would have to go; and
    a bias of the lowest number would hide what is said there about the greatest weight.
    """
    latent, scales = source.latent, source.scales
    if (
        scales is None
        or is_packed(latent, scales)
        or not machine.arch.startswith("sm_")
        or tiles.rows > MOST_ROWS_OF_WORDS
    ):
        return 0
    groups, rank = scales.shape[2], q_latent.shape[3]
    width = rank // groups
    taken = (
        q_latent.itemsize == 2
        and word_of(source.mask) != "bias"
        and width == power_of_two(width) >= 2 * LEAST
        and always(latent.stride(0) % 2 == 0)
        and always(latent.stride(1) % 2 == 0)
        and _begins_evenly(latent)
    )
    return groups if taken else 0


def _begins_evenly(codes: Tensor) -> bool:
    """Whether codes begin where a word may."""
    return always(codes.storage_offset() % 2 == 0) if is_traced() else begins_aligned(codes, 2)


def _align(cache: Tensor) -> int:
    """The power of two below 16 that divides the strides of rows; 1 for multiples of 16, which Triton sees itself."""
    divides = (power for power in (16, 8, 4, 2) if all(always(stride % power == 0) for stride in cache.stride()[:2]))
    aligned = next(divides, 1)
    return aligned if aligned < 16 else 1


def mask_kind(mask: Tensor | None) -> MaskKind:
    """The kind of a mask `[B, N, Sq, T]`, whose sizes are 1 where it broadcasts."""
    if mask is None:
        return "none"
    return "of keys" if all(always(size == 1) for size in mask.shape[1:3]) else "of rows"


def word_of(mask: Tensor | None) -> str:
    """The kernels' word for a mask, by its dtype."""
    return "none" if mask is None else "bool" if mask.dtype == torch.bool else "bias"


def strides_of(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    """Strides of a tensor of at most `dims` dims, 0 where it broadcasts or there is none."""
    if tensor is None:
        return (0,) * dims
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    strides = tuple(0 if always(size == 1) else stride for size, stride in sizes)
    return strides + (0,) * (dims - len(strides))
