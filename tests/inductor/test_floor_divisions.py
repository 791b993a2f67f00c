"""Positions divided by a page size on a CPU: Inductor's code for loops that it splits leaves out the last positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import mla_compile
from mla_compile.cache import BlockTable
from mla_compile.inductor.floor_divisions import floor_division
from tests.compile.test_fp8_pages import L, N, P, R, V, attend

PAGE_SIZE, TOKENS = 16, 37


@pytest.mark.parametrize("n", [9, 16, 100])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_it_is_the_floor(dtype, n):
    ends = torch.iinfo(dtype)
    x = torch.cat([torch.arange(-300, 300, dtype=dtype), torch.tensor([ends.min, ends.max], dtype=dtype)])
    table = {torch.ops.aten.div.Tensor_mode: floor_division}
    module = make_fx(lambda x: torch.div(x, n, rounding_mode="floor"), decomposition_table=table)(x)
    quotient = module(x)
    assert "floor" not in module.code
    assert quotient.dtype == dtype
    assert torch.equal(quotient, x // n)


@pytest.mark.parametrize(
    ("x", "n", "rounding_mode"),
    [
        (torch.arange(3), 8, "floor"),
        (torch.arange(3), 16, "trunc"),
        (torch.arange(3), 16.0, "floor"),
        (torch.arange(3), torch.tensor(16), "floor"),
        (torch.arange(3.0), 16, "floor"),
        (torch.arange(3, device="meta"), 16, "floor"),
    ],
)
def test_others_are_left(x, n, rounding_mode):
    assert floor_division(x, n, rounding_mode=rounding_mode) is NotImplemented


def test_a_prompt_that_ends_within_a_page_is_written_and_read_whole():
    """Stock Inductor fails at an index that it never computed, or leaves tokens out."""

    def run(compile) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        pool = mla_compile.PagePool(1, L, R, pages=64, page_size=PAGE_SIZE)
        table = BlockTable(pool, 2)
        q, weight = torch.randn(2, N, 1, P + R), torch.randn(N * (P + V), L) / L**0.5
        tokens = torch.randn(2, TOKENS, L + R)

        def prompt(q: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
            table.extend(TOKENS)
            table.write(0, tokens)
            return attend(q, *table.keys(0), weight, table.lengths)

        with torch.no_grad():
            output = compile(prompt)(q, weight, tokens)
        assert torch.equal(table.read(0), tokens)
        return output, table.pages

    output, pages = run(lambda function: torch.compile(function, backend="mla", fullgraph=True))
    assert mla_compile.last_report().rewritten == 1
    eager, own = run(lambda function: function)
    torch.testing.assert_close(output, eager)
    assert torch.equal(pages, own)
