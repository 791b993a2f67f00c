"""Chunked MLA on a GPU: library products up-project a chunk into a workspace, `kernel` attends to it.

    latent [B, T, L], w_uk [N, P, L], w_uv [N, V, L]
    k, v   [H, B, C, P], [H, B, C, V]   the workspace: see `share`

Nothing here reads a value from the device. Under a causal limit alone, if the host knows it, keys that all queries see
are in chunks of their own, which apply no limit; with lengths that only the device knows, programs without work end at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from .._common.launch import strides_of, word_of
from .._common.machine import Machine
from .._common.plans import Plans
from .._common.tiles import Tiles, constants_of_heads
from .._common.tuning import Run, bucket, is_on, neighbours, tuned
from ..share import PROGRAMS, in_even_groups, share_of
from ..two_latents import latents_of
from ..visibility import causal_stop, part_of
from .arguments import ExpandedAttention, Expansion
from .kernel import attend_chunk
from .tiles import choose, fits

_BYTES = 128 << 20
"""The most bytes of workspace and running sums together; heads are taken in groups that stay below it."""


@dataclass(frozen=True)
class Chunk:
    """Keys `start` to `stop`; `causal`: not all queries see all of them."""

    start: int
    stop: int
    causal: bool


@dataclass(frozen=True)
class Lengths:
    """Numbers per sequence, `[B]` and contiguous, on the device."""

    tokens: Tensor
    starts: Tensor | None
    """The position of the first query; None where there is no causal limit."""
    queries: Tensor | None
    """How many queries are not padding; None where none is padding."""

    def of(self, part: slice) -> Lengths:
        """The numbers of some of the sequences."""
        tokens, starts, queries = (t if t is None else t[part] for t in (self.tokens, self.starts, self.queries))
        assert tokens is not None
        return Lengths(tokens, starts, queries)


@dataclass(frozen=True)
class BatchKeys:
    """The keys of a batch."""

    tokens: int
    """The most tokens of a sequence."""
    rope: int
    """R."""
    take: Callable[[slice, Chunk, Tensor], tuple[Tensor, Tensor]]
    """Latents `[b, C, L]` and rope keys `[b, C, 1 or N, R]` of some sequences and a chunk: views, or copies in a
    workspace."""
    copied: int = 0
    """Elements per key that `take` copies to the workspace."""
    causal_offset: int | None = None
    lengths: Lengths | None = None

    @property
    def causal(self) -> bool:
        return self.causal_offset is not None or (self.lengths is not None and self.lengths.starts is not None)


def expanded_attention_triton(
    x: ExpandedAttention, machine: Machine, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """o and lse, on a machine."""
    latent, ropes = x.latent, x.ropes
    ropes = ropes if ropes.shape[3] < 2 or ropes.stride(3) == 1 else ropes.contiguous()

    def take(part: slice, chunk: Chunk, workspace: Tensor) -> tuple[Tensor, Tensor]:
        return latent[part, chunk.start : chunk.stop], ropes[part, chunk.start : chunk.stop]

    tokens = causal_stop(x.causal_offset, range(x.q.shape[1]), latent.shape[1])
    keys = BatchKeys(tokens, ropes.shape[3], take, causal_offset=x.causal_offset)
    return attend_in_chunks(x, keys, machine, tiles)


def attend_in_chunks(x: Expansion, keys: BatchKeys, machine: Machine, tiles: Tiles | None) -> tuple[Tensor, Tensor]:
    """o `[B, Sq, N, V]` and lse `[B, Sq, N]` of a bundle's queries under its mask."""
    q, w_uk, w_uv, mask, workspace_tokens = x.q, x.w_uk, x.w_uv, x.mask, x.workspace_tokens
    batch, queries, heads, _ = q.shape
    (_, nope, _), columns = w_uk.shape, w_uv.shape[1]
    o = q.new_empty((batch, queries, heads, columns))
    lse = q.new_empty((batch, queries, heads), dtype=torch.float32)
    padded = keys.lengths is not None and keys.lengths.queries is not None
    if padded or lse.numel() == 0 or keys.tokens == 0:
        o, lse = o.zero_(), lse.fill_(-torch.inf)
    if lse.numel() == 0 or keys.tokens == 0:
        return o, lse
    q = q if q.stride(3) == 1 else q.contiguous()
    if tiles is None and is_on():
        hidden = None if mask is None else mask.dtype, keys.causal, keys.lengths is not None
        problem = q.dtype, nope, keys.rope, columns, *hidden, workspace_tokens, *q.shape[:3], keys.tokens
        tiles = _tuned(machine, problem, lambda tiles: attend_in_chunks(x, keys, machine, tiles))
    plan = _plan(x, keys, machine, tiles)
    sequences, group, chunks = plan.sequences, plan.heads, plan.chunks
    workspace, copies = q.new_empty(plan.workspace), q.new_empty(plan.copies)
    state = [q.new_empty(count, dtype=torch.float32) for count in plan.state]
    for b in range(0, batch, sequences):
        taken: tuple[Tensor, Tensor] | None = None
        for head in range(0, heads, group):
            part = slice(b, b + sequences), slice(head, head + group)
            lengths = None if keys.lengths is None else keys.lengths.of(part[0])
            for i, chunk in enumerate(chunks):
                if taken is None or len(chunks) > 1:
                    taken = keys.take(part[0], chunk, copies)
                latent, ropes = taken
                seen = part_of(mask, *part, slice(chunk.start, chunk.stop))
                if seen is not None and seen.dtype == torch.bool:
                    latent = latent.masked_fill(_hidden(seen, chunk, queries, keys, lengths)[..., None], 0.0)
                k, v = _expand(latent, w_uk[part[1]], w_uv[part[1]], workspace)
                _launch(
                    (q[part[0], :, part[1]], k, ropes if ropes.shape[2] == 1 else ropes[:, :, part[1]], v),
                    seen,
                    lengths,
                    (o[part[0], :, part[1]], lse[part[0], :, part[1]]),
                    state,
                    chunk,
                    x.scale,
                    (keys.causal_offset or 0) - chunk.start,
                    (i == 0, i == len(chunks) - 1),
                    plan.tiles,
                    plan.constants[i],
                )
    return o, lse


@dataclass(frozen=True)
class _Plan:
    """How a problem is cut into launches, and what these are specialised to."""

    tiles: Tiles
    sequences: int
    heads: int
    """Heads taken at a time; `sequences` likewise."""
    chunks: tuple[Chunk, ...]
    constants: tuple[dict[str, Any], ...]
    """The kernel's constants for the launch of each chunk."""
    workspace: int
    copies: int
    state: tuple[int, int, int]
    """Elements of sums, greatest scores and totals; 0 where all keys are one chunk."""


PLANS = Plans[_Plan]()


def _plan(x: Expansion, keys: BatchKeys, machine: Machine, tiles: Tiles | None) -> _Plan:
    lengths = keys.lengths
    hidden = None if lengths is None else (lengths.starts is not None, lengths.queries is not None)
    asked = keys.tokens, keys.rope, keys.copied, keys.causal_offset, hidden, None if x.mask is None else x.mask.dtype
    key = machine, tiles, x.workspace_tokens, x.q.shape, x.q.dtype, x.w_uk.shape, x.w_uv.shape, asked
    return PLANS.get(key, lambda: _new_plan(x, keys, machine, tiles))


def _new_plan(x: Expansion, keys: BatchKeys, machine: Machine, tiles: Tiles | None) -> _Plan:
    batch, queries, heads, _ = x.q.shape
    nope, columns = x.w_uk.shape[1], x.w_uv.shape[1]
    tiles = tiles or choose(machine, nope, keys.rope, columns, x.q.itemsize, x.mask is not None)
    fewest = triton.cdiv(PROGRAMS * machine.processors, triton.cdiv(queries, tiles.rows))
    share = share_of(batch, heads, keys.tokens, x.workspace_tokens, fewest)
    sequences, size = share.sequences, share.tokens
    chunks = tuple(chunks_of(keys, size, x.mask is not None))
    several = len(chunks) > 1
    each = sequences * size * (nope + columns) * x.q.itemsize
    each += sequences * queries * (columns + 2) * 4 if several else 0
    group = in_even_groups(share.heads, max(_BYTES // each, 1))
    rows = sequences * group * queries if several else 0
    widths = nope, keys.rope, columns
    return _Plan(
        tiles,
        sequences,
        group,
        chunks,
        tuple(constants_of(widths, x.mask, keys.lengths, chunk.causal, several, tiles) for chunk in chunks),
        group * sequences * size * (nope + columns),
        sequences * size * keys.copied,
        (rows * columns, rows, rows),
    )


def _tuned(machine: Machine, problem: tuple[Any, ...], run: Run[Tiles]) -> Tiles:
    """The fastest tiles, while tuning is on, for a problem as `attend_in_chunks` describes it."""
    dtype, nope, rope, columns, mask = problem[:5]
    widths = nope, rope, columns, dtype.itemsize
    default = choose(machine, *widths, mask is not None)
    return tuned(
        machine,
        ("chunks", *problem[:-4], *map(bucket, problem[-4:])),
        default,
        lambda: neighbours(default, lambda tiles: fits(machine, tiles, *widths)),
        run,
    )


def chunks_of(keys: BatchKeys, size: int, masked: bool) -> Iterator[Chunk]:
    """Chunks of at most `size` keys; if there are several, also cut where a causal limit alone starts to hide some."""
    cut = 0
    if keys.causal_offset is not None and not masked and keys.tokens > size:
        cut = min(max(keys.causal_offset, 0), keys.tokens)
    for begin, end, limited in ((0, cut, False), (cut, keys.tokens, keys.causal)):
        for start in range(begin, end, size):
            yield Chunk(start, min(start + size, end), limited)


def _expand(latent: Tensor, w_uk: Tensor, w_uv: Tensor, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """Up-project latents `[b, C, L]` into the workspace: `[H, b, C, P]` and `[H, b, C, V]`."""
    sequences, count, _ = latent.shape
    start, expanded = 0, []
    for own, w in zip(latents_of(latent, w_uk, w_uv), (w_uk, w_uv), strict=True):
        shape = w.shape[0], sequences * count, w.shape[1]
        rows = own.reshape(1, sequences * count, w.shape[2]).expand(w.shape[0], -1, -1)
        out = workspace[start : start + shape[0] * shape[1] * shape[2]].view(shape)
        torch.bmm(rows, w.transpose(1, 2), out=out)
        expanded.append(out.unflatten(1, (sequences, count)))
        start += out.numel()
    return expanded[0], expanded[1]


def _hidden(mask: Tensor, chunk: Chunk, queries: int, keys: BatchKeys, lengths: Lengths | None) -> Tensor:
    """Keys of a chunk that no query sees, bool `[b or 1, C or 1]`. They may hold anything, so no product may read them.

    The bool mask, `[b or 1, H or 1, Sq or 1, C or 1]`, and `lengths` are the parts for the current sequences, heads and
    keys; the mask may lack keys that no sequence has.
    """
    seen, count = mask.any(1), chunk.stop - chunk.start
    known = count if mask.shape[3] == 1 else mask.shape[3]
    query = torch.arange(queries, device=mask.device)[:, None]
    if chunk.causal:
        first: Tensor | int = keys.causal_offset or 0
        if lengths is not None and lengths.starts is not None:
            first = lengths.starts[:, None, None]
        seen = seen & (torch.arange(chunk.start, chunk.start + known, device=mask.device) <= query + first)
    if lengths is not None and lengths.queries is not None:
        seen = seen & (query < lengths.queries[:, None, None])
    return torch.nn.functional.pad(~seen.any(1), (0, count - known), value=True)


def _launch(
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: Tensor | None,
    lengths: Lengths | None,
    out: tuple[Tensor, Tensor],
    state: list[Tensor],
    chunk: Chunk,
    scale: float,
    causal_offset: int,
    first_last: tuple[bool, bool],
    tiles: Tiles,
    constants: dict[str, Any],
) -> None:
    q, k, rope, v = operands
    batch, queries, heads, _ = q.shape
    numbers = (None,) * 3 if lengths is None else (lengths.tokens, lengths.starts, lengths.queries)
    attend_chunk[(triton.cdiv(queries, tiles.rows) * heads * batch,)](
        q,
        k,
        rope,
        v,
        q if mask is None else mask,
        *(out[1] if number is None else number for number in numbers),
        *out,
        *state,
        scale,
        *(queries, heads, chunk.stop - chunk.start, causal_offset, chunk.start, *map(int, first_last)),
        *q.stride()[:3],
        *k.stride()[:2],
        *v.stride()[:2],
        *rope.expand(-1, -1, heads, -1).stride()[:3],
        *strides_of(mask, 4),
        *out[0].stride()[:3],
        *out[1].stride(),
        **constants,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        enable_fp_fusion=True,
    )


def constants_of(
    widths: tuple[int, int, int],
    mask: Tensor | None,
    lengths: Lengths | None,
    causal: bool,
    state: bool,
    tiles: Tiles,
) -> dict[str, Any]:
    """The constants that the kernel is specialised to; widths are `P, R, V`."""
    return {
        "MASK": word_of(mask),
        "CAUSAL": causal,
        "LENGTHS": lengths is not None,
        "COUNTS": lengths is not None and lengths.queries is not None,
        "STATE": state,
        **constants_of_heads(widths, tiles),
    }
