"""A compiled step over a naive cache in int8 pages: new tokens are quantised in place, pages are read as they are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import mla_compile
from tests.compile.test_fp8_pages import PAGE_SIZE, PAGES, B, L, N, P, R, V, assert_alike, attend
from tests.errors import assert_as_close_as_eager


def read(rows: Tensor, scales: Tensor, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Latents and rope keys, which share a row and its scale."""
    tokens = (rows[table].to(dtype) * scales[table][..., None].to(dtype)).flatten(1, 2)
    latent, k_rope = tokens.split([L, R], dim=-1)
    return latent, k_rope


def step(
    q: Tensor, weight: Tensor, rows: Tensor, scales: Tensor, table: Tensor, lengths: Tensor, new: Tensor
) -> Tensor:
    last = lengths - 1
    place = table[torch.arange(len(table)), last // PAGE_SIZE], last % PAGE_SIZE
    scale = new.abs().amax(-1).clamp_min(2.0**-100) / 127
    rows[place], scales[place] = (new / scale[:, None]).round().to(torch.int8), scale
    return attend(q, *read(rows, scales, table, q.dtype), weight, lengths)


def test_a_step_quantises_in_place_and_reads_the_pages() -> None:
    table = torch.randperm(PAGES)[: B * 8].view(B, 8)
    lengths = torch.tensor([100, 128])

    def inputs() -> list[Tensor]:
        torch.manual_seed(1)
        q, weight = torch.randn(B, N, 1, P + R), torch.randn(N * (P + V), L) / L**0.5
        rows, scales = (
            torch.randint(-128, 128, (PAGES, PAGE_SIZE, L + R), dtype=torch.int8),
            torch.rand(PAGES, PAGE_SIZE),
        )
        scales /= 50
        new = torch.randint(-126, 127, (B, L + R)).float()  # multiples of the scale: nothing is rounded
        new[:, 0] = 127
        return [q, weight, rows, scales, table, lengths, new / 64]

    own, plain = inputs(), inputs()
    eager = step(*plain)
    q, weight, rows, scales = plain[:4]
    exact = attend(q.double(), *read(rows, scales, table, torch.float64), weight.double(), lengths)
    compiled = torch.compile(step, backend="mla", fullgraph=True)
    output, (code,) = run_and_get_code(compiled, *own)
    (site,) = mla_compile.last_report().sites
    assert site.path == "absorbed"
    assert site.reason.endswith("reads the pages")
    assert f"({PAGES}, {PAGE_SIZE}" not in "".join(line for line in code.splitlines() if "empty_strided" in line)
    assert_as_close_as_eager(output, eager, exact)
    assert_alike(own, plain)
