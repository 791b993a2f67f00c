"""Under `torch.use_deterministic_algorithms` nothing raises, and every run gives the same bits.

torch then fills new tensors with NaN, so elements that a kernel leaves unwritten show.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

import mla_compile
from tests.compile.layers import Layer, hidden
from tests.models import Combined
from tests.training import assert_gradients_close, gradients

pytestmark = pytest.mark.usefixtures("deterministic")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_steps_give_the_same_bits(dtype: torch.dtype) -> None:
    module = Layer().to(dtype)
    x = hidden(dtype, tokens=40)
    wide = copy.deepcopy(module).double()
    exact = gradients(wide, wide, [x.double()])
    compiled = torch.compile(module, backend="mla", dynamic=False)
    first, second = (gradients(compiled, module, [x]) for _ in range(2))
    assert mla_compile.last_report().rewritten == 1
    assert_gradients_close(first, gradients(module, module, [x]), exact)
    for one, other in zip(first, second, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


@pytest.mark.parametrize("path", ["absorbed", pytest.param("chunked", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompts_and_steps_give_the_same_bits(path: str, dtype: torch.dtype) -> None:
    module = Combined().to(dtype)
    compiled = torch.compile(module, backend="mla", dynamic=False, options={"mla.path": path})
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        with torch.no_grad():
            prompt, cache = compiled(hidden(dtype, tokens=40), module.empty_cache(2, dtype))
            step, _ = compiled(hidden(dtype, tokens=1), cache)
        assert mla_compile.last_report().rewritten == 1
        runs.append((prompt, step))
    for one, other in zip(*runs, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
