"""Compiled steps over a cache in FP8 pages: new tokens are quantised in place, and pages are read as they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import mla_compile
import mla_compile.kernels.register  # registers what `append_latents` does
from mla_compile.device import rates_of
from mla_compile.fp8 import RowLayout
from tests.errors import DRAWS, assert_as_close_as_eager, assert_as_close_as_eager_on_average

FP8 = torch.float8_e4m3fn
B, N, L, P, R, V, G, PAGES, PAGE_SIZE = 2, 4, 32, 16, 8, 16, 2, 900, 16


def write(pages: Tensor, scales: Tensor, rope: Tensor, place: tuple[Tensor, Tensor], new: Tensor) -> None:
    latent, k_rope = new.split([L, R], dim=-1)
    grouped = latent.float().unflatten(-1, (G, -1))
    scale = grouped.abs().amax(-1).clamp_min(2.0**-100) / 448
    pages[place] = (grouped / scale[..., None]).flatten(-2).to(FP8)
    scales[place] = scale
    rope[place] = k_rope


def read(pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    latent = pages[table].float().unflatten(-1, (scales.shape[-1], -1)) * scales[table][..., None]
    return latent.flatten(-2).flatten(1, 2).to(rope.dtype), rope[table].flatten(1, 2)


def attend(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, lengths: Tensor) -> Tensor:
    k_nope, v = (latent @ weight.T).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
    seen = torch.arange(latent.shape[1], device=q.device) < lengths[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def step(
    q: Tensor, weight: Tensor, pages: Tensor, scales: Tensor, rope: Tensor, table: Tensor, lengths: Tensor, new: Tensor
) -> Tensor:
    last = lengths - 1
    place = table[torch.arange(len(table), device=q.device), last // PAGE_SIZE], last % PAGE_SIZE
    write(pages, scales, rope, place, new)
    return attend(q, *read(pages, scales, rope, table), weight, lengths)


def test_a_step_quantises_in_place_and_reads_the_pages() -> None:
    table = torch.randperm(PAGES)[: B * 8].view(B, 8)
    lengths = torch.tensor([100, 128])

    def inputs(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        q, weight = torch.randn(B, N, 1, P + R), torch.randn(N * (P + V), L) / L**0.5
        pages, scales = torch.randn(PAGES, PAGE_SIZE, L).to(FP8), torch.rand(PAGES, PAGE_SIZE, G)
        return [q, weight, pages, scales, torch.randn(PAGES, PAGE_SIZE, R), table, lengths, torch.randn(B, L + R)]

    compiled = torch.compile(step, backend="mla", fullgraph=True)
    _, (code,) = run_and_get_code(compiled, *inputs(0))
    (site,) = mla_compile.last_report().sites
    assert site.reason.endswith("reads the pages")
    assert f"({PAGES}, {PAGE_SIZE}" not in "".join(line for line in code.splitlines() if "empty_strided" in line)
    draws = []
    for seed in range(DRAWS):
        own, plain = inputs(seed), inputs(seed)
        results = compiled(*own), step(*plain)
        q, weight, *cache = plain
        keys = (each.double() for each in read(*cache[:4]))
        draws.append((*results, attend(q.double(), *keys, weight.double(), lengths)))
        assert_alike(own, plain)
    assert_as_close_as_eager_on_average(*zip(*draws, strict=True))


def assert_alike(own: list[Tensor], plain: list[Tensor]) -> None:
    for mine, theirs in zip(own, plain, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


ROWS = RowLayout(L, R, torch.float32)


def packed_step(
    q: Tensor, weight: Tensor, rows: Tensor, table: Tensor, lengths: Tensor, latent: Tensor, k_rope: Tensor
) -> Tensor:
    last = lengths - 1
    slots = table[torch.arange(len(table)), last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE
    torch.ops.mla.append_latents(latent, k_rope, slots, rows)
    return attend(q, *read(*ROWS.views(rows), table), weight, lengths)


def test_packed_rows_are_written_in_place_and_read_through_their_views() -> None:
    table = torch.randperm(PAGES)[: B * 8].view(B, 8)
    lengths = torch.tensor([100, 128])

    def inputs() -> list[Tensor]:
        torch.manual_seed(1)
        q, weight = torch.randn(B, N, 1, P + R), torch.randn(N * (P + V), L) / L**0.5
        rows = torch.zeros(PAGES, PAGE_SIZE, ROWS.row_bytes, dtype=torch.uint8)
        torch.ops.mla.append_latents(
            torch.randn(PAGES * PAGE_SIZE, L), torch.randn(PAGES * PAGE_SIZE, R), torch.arange(PAGES * PAGE_SIZE), rows
        )
        return [q, weight, rows, table, lengths, torch.randn(B, L), torch.randn(B, R)]

    own, plain = inputs(), inputs()
    eager = packed_step(*plain)
    q, weight, rows = plain[:3]
    exact = attend(q.double(), *(k.double() for k in read(*ROWS.views(rows), table)), weight.double(), lengths)
    compiled = torch.compile(packed_step, backend="mla", fullgraph=True)
    output, (code,) = run_and_get_code(compiled, *own)
    (site,) = mla_compile.last_report().sites
    assert site.reason.endswith("reads the pages")
    assert f"({PAGES}, {PAGE_SIZE}" not in "".join(line for line in code.splitlines() if "empty_strided" in line)
    assert_as_close_as_eager(output, eager, exact)
    assert_alike(own, plain)


def test_a_cache_in_fp8_is_not_what_a_device_is_measured_with() -> None:
    """Even if it is the first input, or the only one."""
    numbers, q = torch.zeros(1).to(FP8), torch.zeros(1)
    assert rates_of([numbers, q]) == rates_of([q]) == rates_of([numbers])
