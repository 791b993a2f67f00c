"""A compiled step over a pool in INT4: new tokens are quantised in place, pages are read as they are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import mla_compile
from mla_compile.cache import BlockTable
from tests.compile.test_fp8_pages import L, N, P, R, V, attend
from tests.errors import assert_as_close_as_eager

PAGES, PAGE_SIZE, TOKENS = 40, 16, 100


def filled() -> BlockTable:
    """A table of two sequences of 99 tokens."""
    torch.manual_seed(0)
    pool = mla_compile.INT4PagePool(1, L, R, PAGES, PAGE_SIZE)
    table = BlockTable(pool, 2)
    table.extend(TOKENS - 1)
    table.write(0, torch.randn(2, TOKENS - 1, L + R))
    return table


def test_a_step_quantises_in_place_and_reads_the_pages() -> None:
    own, plain = filled(), filled()
    q, weight = torch.randn(2, N, 1, P + R), torch.randn(N * (P + V), L) / L**0.5
    new = torch.randint(-7, 8, (2, 1, L + R)).float()  # multiples of the scale: nothing is rounded
    new[..., ::16] = 7
    lengths = torch.tensor([TOKENS, 60])

    def step(table: BlockTable, q: Tensor, weight: Tensor, new: Tensor) -> Tensor:
        table.extend(1)
        table.write(0, new / 64)
        return attend(q, *table.keys(0), weight, lengths)

    eager = step(plain, q, weight, new)
    exact = attend(q.double(), *(keys.double() for keys in plain.keys(0)), weight.double(), lengths)
    compiled = torch.compile(lambda *tensors: step(own, *tensors), backend="mla", fullgraph=True)
    output, (code,) = run_and_get_code(compiled, q, weight, new)
    (site,) = mla_compile.last_report().sites
    assert site.path == "absorbed"
    assert site.reason.endswith("reads the pages")
    assert f"({PAGES}, {PAGE_SIZE}" not in "".join(line for line in code.splitlines() if "empty_strided" in line)
    assert_as_close_as_eager(output, eager, exact)
    for mine, theirs in zip(own.pool.tensors, plain.pool.tensors, strict=True):
        assert torch.equal(mine, theirs)
