"""Loops that sum rows of weights ask for the numbers a page ahead; no other loops do, and none outside the context."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import mla_compile
from mla_compile.inductor.row_prefetches import LEAST_BYTES, PAGE, rows_prefetched
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, Combined, L, R

ROWS, WIDTH = 520, 512
ASKED = re.compile(r"__builtin_prefetch\(reinterpret_cast<const char\*>\((\w+) \+ .*?\) \+ (\d+), 0, 2\);")


def code_of(function: Callable[..., Tensor], *given: Tensor, dynamic: bool = False) -> tuple[Tensor, str]:
    torch._dynamo.reset()
    settings = torch._inductor.config.patch(fx_graph_cache=False)
    with settings, torch._functorch.config.patch(enable_autograd_cache=False):
        result, (code,) = run_and_get_code(torch.compile(function, dynamic=dynamic), *given)
    return result, code


def row_times_weight(row: Tensor, weight: Tensor) -> Tensor:
    return (row.float() * weight.float()).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_a_weight_are_asked_for(dtype):
    row, weight = torch.randn(2 * WIDTH).to(dtype), torch.randn(ROWS, 2 * WIDTH).to(dtype)
    assert weight.nbytes >= LEAST_BYTES
    plain, stock = code_of(row_times_weight, row, weight)
    with rows_prefetched():
        result, code = code_of(row_times_weight, row, weight)
    assert torch.equal(result, plain)
    assert {ahead for _, ahead in ASKED.findall(code)} == {str(PAGE)}
    (pointer,) = {pointer for pointer, _ in ASKED.findall(code)}
    assert len(set(re.findall(rf"loadu\({pointer} \+ ", code))) == 1, "the weight, not the row"
    lines = [line for line in code.splitlines() if "__builtin_prefetch" not in line]
    assert [line for line in lines if "in_ptr" in line] == [line for line in stock.splitlines() if "in_ptr" in line]


def test_rows_of_chosen_matrices_are_asked_for():
    row, weights, chosen = torch.randn(WIDTH), torch.randn(4, ROWS, WIDTH), torch.tensor([3, 1])

    def experts(row: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return (row * weights[chosen]).sum(-1)

    with rows_prefetched():
        result, code = code_of(experts, row, weights, chosen)
    assert ASKED.search(code)
    torch.testing.assert_close(result, experts(row, weights, chosen))


OTHERS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "a small weight": (lambda x: (x * 2).sum(-1), (64, WIDTH)),
    "no rows": (lambda x: (x * 2).sum(), (ROWS * WIDTH,)),
    "no sum": (lambda x: x * 2, (ROWS, WIDTH)),
    "columns": (lambda x: (x * 2).sum(0), (ROWS, WIDTH)),
    "every other number": (lambda x: (x[:, ::2] * 2).sum(-1), (ROWS, 2 * WIDTH)),
    "of a size that is not known": (lambda x: (x * 2).sum(-1), (ROWS, WIDTH)),
}


@pytest.mark.parametrize(("function", "size"), OTHERS.values(), ids=OTHERS)
def test_other_loops_stay_as_they_are(function, size, request):
    x = torch.randn(size)
    with rows_prefetched():
        result, code = code_of(function, x, dynamic="not known" in request.node.name)
    assert "__builtin_prefetch" not in code
    torch.testing.assert_close(result, function(x), rtol=1e-4, atol=1e-4)


class WithOutput(nn.Module):
    """An attention, and a projection whose weight is large enough."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = Combined(), nn.Linear(HIDDEN, LEAST_BYTES // HIDDEN, bias=False)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        return self.out(self.attention(x, cache)[0])


@torch.no_grad()
def test_a_rewritten_step_has_such_loops():
    module, x, cache = WithOutput(), torch.randn(1, 1, HIDDEN), (torch.randn(1, 40, L), torch.randn(1, 40, R))
    with torch._inductor.config.patch(fx_graph_cache=False):
        result, (code,) = run_and_get_code(torch.compile(module, backend="mla"), x, cache)
    assert mla_compile.last_report().rewritten == 1
    assert ASKED.search(code)
    doubled = WithOutput().double()
    doubled.load_state_dict(module.state_dict())
    exact = doubled(x.double(), tuple(part.double() for part in cache))
    assert_as_close_as_eager(result, module(x, cache), exact)
    assert "__builtin_prefetch" not in code_of(module.out, x)[1]
