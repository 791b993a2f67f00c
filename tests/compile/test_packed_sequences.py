"""A module that attends to packed sequences, compiled: batches of any lengths are as close to float64 as in eager."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

import mla_compile
from tests import packed
from tests.models import HIDDEN, L, N, P, R, V

BATCHES = {
    "decode": ([1, 1, 1], [50, 190, 20]),
    "decode of more": ([1] * 5, [50, 90, 20, 70, 3]),
    "prompts": ([30, 50, 20], [30, 50, 20]),
    "long prompts": ([230, 90], [230, 90]),
    "mixed": ([1, 70, 1, 1], [200, 70, 90, 3]),
    "none of some": ([3, 0, 5], [3, 4, 7]),
    "fewer keys than queries": ([9, 2], [5, 1]),
}


class Packed(nn.Module):
    """New tokens of several sequences attend to all tokens of their own sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, N * (P + R))
        self.kv_a = nn.Linear(HIDDEN, L + R)
        self.norm = nn.RMSNorm(L)
        self.kv_b = nn.Linear(L, N * (P + V), bias=False)
        self.o = nn.Linear(N * V, HIDDEN)

    def forward(self, x: Tensor, cached: Tensor, starts: Sequence[Tensor], most: Sequence[int]) -> Tensor:
        """x `[Tq, HIDDEN]`, cached `[Tk, L + R]`: what `kv_a` gave."""
        latent, k_rope = cached.split([L, R], -1)
        k, v = self.kv_b(self.norm(latent)).view(-1, N, P + V).split([P, V], -1)
        k = torch.cat([k, k_rope[:, None].expand(-1, N, -1)], -1)
        q, v = self.q(x).view(-1, N, P + R), F.pad(v, (0, P + R - V))
        o = varlen_attn(q, k, v, *starts, *most, window_size=(-1, 0))
        return self.o(o[..., :V].flatten(1))


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with packed.on_cpu():
        yield


def inputs(lengths: tuple[list[int], list[int]], dtype: torch.dtype) -> tuple[Any, ...]:
    starts = [torch.tensor([0, *own]).cumsum(0).int() for own in lengths]
    x, cached = (torch.randn(sum(own), width).to(dtype) for own, width in zip(lengths, (HIDDEN, L + R), strict=True))
    return x, cached, starts, [max(own) for own in lengths]


def assert_as_close_as_eager(module: nn.Module, o: Tensor, x: Tensor, cached: Tensor, *rest: Any) -> None:
    """Allow twice eager's error, and one more rounding of the output."""
    exact = copy.deepcopy(module).double()(x.double(), cached.double(), *rest)
    eager = float((module(x, cached, *rest) - exact).abs().max())
    rounding = torch.finfo(o.dtype).eps * float(exact.abs().max())
    assert float((o - exact).abs().max()) <= 2 * eager + rounding


@pytest.mark.slow
@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batches_of_any_lengths(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, before = Packed().to(dtype), len(mla_compile.reports())
    compiled = torch.compile(module, backend="mla")
    with torch.no_grad():
        for lengths in BATCHES.values():
            arguments = inputs(lengths, dtype)
            assert_as_close_as_eager(module, compiled(*arguments), *arguments)
    sites = [site for report in mla_compile.reports()[before:] for site in report.sites]
    assert {site.path for site in sites} == {"absorbed", "chunked"}
    assert {site.mask for site in sites} == {"sequences + causal"}
    # Compiled for fixed and for dynamic sizes, for as many queries as keys and for fewer, and for either path.
    assert len(sites) <= 6


@pytest.mark.usefixtures("without_codegen")
def test_a_batch_is_verified() -> None:
    torch.manual_seed(0)
    module, arguments = Packed(), inputs(BATCHES["mixed"], torch.float32)
    with torch.no_grad():
        o = torch.compile(module, backend="mla", options={"mla.verify": True})(*arguments)
        assert_as_close_as_eager(module, o, *arguments)
    assert mla_compile.last_report().rewritten == 1


@pytest.mark.slow
def test_generated_code() -> None:
    torch.manual_seed(0)
    module = Packed()
    compiled = torch.compile(module, backend="mla", dynamic=True, options={"mla.verify": True})
    with torch.no_grad():
        for lengths in BATCHES["mixed"], BATCHES["none of some"]:
            arguments = inputs(lengths, torch.float32)
            assert_as_close_as_eager(module, compiled(*arguments), *arguments)
    assert mla_compile.last_report().rewritten == 1


@pytest.mark.usefixtures("without_codegen")
def test_with_gradients_it_is_left() -> None:
    torch.manual_seed(0)
    module, arguments = Packed(), inputs(BATCHES["mixed"], torch.float32)
    with torch.enable_grad():
        o = torch.compile(module, backend="mla")(*arguments)
    (site,) = mla_compile.last_report().sites
    assert site.reason.startswith(
        "expected attention in which all queries have the same keys where gradients are needed, found packed"
    )
    torch.testing.assert_close(o, module(*arguments))
