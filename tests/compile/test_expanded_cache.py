"""A cache of expanded keys and values, as in transformers 4.57 to 5.14: a decode step stays unchanged, and the report
says what to upgrade."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, L, N, P, R, V, rope

LENGTH = 16


class Growing:
    """Appends keys and values to those of earlier calls."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.stored = torch.zeros(2, N, 0, P + R, dtype=dtype), torch.zeros(2, N, 0, V, dtype=dtype)
        self.seen = 0

    def update(self, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        self.stored = torch.cat([self.stored[0], k], dim=2), torch.cat([self.stored[1], v], dim=2)
        return self.stored


class Lazy(Growing):
    """Begins as transformers' `DynamicCache`, with tensors of one dimension."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.stored = torch.tensor([], dtype=dtype), torch.tensor([], dtype=dtype)


class Static:
    """Keys and values in buffers of a fixed length."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.stored = torch.zeros(2, N, LENGTH, P + R, dtype=dtype), torch.zeros(2, N, LENGTH, V, dtype=dtype)
        self.seen = 0

    def update(self, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        for buffer, new in zip(self.stored, (k, v), strict=True):
            buffer.index_copy_(2, position, new)
        return self.stored


class Layer(nn.Module):
    """DeepSeek-V3's attention, which caches the expanded keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, N * (P + R), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(HIDDEN, L + R, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(L)
        self.kv_b_proj = nn.Linear(L, N * (P + V), bias=False)
        self.o_proj = nn.Linear(N * V, HIDDEN, bias=False)

    def forward(self, x: Tensor, cache: Growing | Static, start: int) -> Tensor:
        B, S, _ = x.shape
        q_pass, q_rot = self.q_proj(x).view(B, S, N, P + R).split([P, R], dim=-1)
        compressed, k_rot = self.kv_a_proj_with_mqa(x).split([L, R], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(compressed)).view(B, S, N, P + V)
        k_pass, v = expanded.transpose(1, 2).split([P, V], dim=-1)
        k_rot = rope(k_rot[:, :, None], start).transpose(1, 2).expand(-1, N, -1, -1)
        q = torch.cat([q_pass, rope(q_rot, start)], dim=-1).transpose(1, 2)
        position = start + torch.arange(S)
        k, v = cache.update(torch.cat([k_pass, k_rot], dim=-1), v, position)
        seen = torch.arange(k.shape[2]) <= position[:, None]
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o_proj(o.transpose(1, 2).reshape(B, S, N * V))


def outputs(layer: nn.Module, kind: type[Growing | Static], x: Tensor) -> tuple[list[Tensor], list[mla_compile.Report]]:
    """A prefill of 6 tokens and a decode step, each with the report of its compilation."""
    cache, found = kind(x.dtype), []
    reports = []
    for start, end in ((0, 6), (6, 7)):
        found.append(layer(x[:, start:end], cache, start))
        reports.append(mla_compile.last_report())
    return found, reports


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(
    ("kind", "prefill"),
    [(Growing, "chunked"), (Lazy, "chunked"), pytest.param(Static, "unchanged", marks=pytest.mark.slow)],
)
def test_the_reason_says_what_to_upgrade(kind: type[Growing | Static], prefill: str) -> None:
    layer, x = Layer(), torch.randn(2, 7, HIDDEN)
    exact, _ = outputs(layer.double(), kind, x.double())
    eager, _ = outputs(layer.float(), kind, x)
    layer.compile(backend="mla")
    compiled, (first, second) = outputs(layer, kind, x)
    for c, e, exactly in zip(compiled, eager, exact, strict=True):
        assert_as_close_as_eager(c, e, exactly)
    assert [site.path for site in first.sites] == [prefill]
    assert [site.path for site in second.sites] == ["unchanged"]
    for site in (*first.sites, *second.sites):
        if not site.rewritten:
            assert "keys and values that are stored expanded" in site.reason
            assert "transformers >= 5.15" in site.remedy


@pytest.mark.usefixtures("without_codegen")
def test_a_cache_of_other_keys_and_values_is_no_such_miss() -> None:
    """Multi-head attention: keys, with rope, and values have a weight each and no latent in common."""

    def attention(x: Tensor, w_k: Tensor, w_v: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
        k = torch.cat([past_k, rope((x @ w_k).view(2, 3, N, R), 4)], dim=1).transpose(1, 2)
        v = torch.cat([past_v, (x @ w_v).view(2, 3, N, V)], dim=1).transpose(1, 2)
        return F.scaled_dot_product_attention(k, k, v)

    shapes = (2, 3, HIDDEN), (HIDDEN, N * R), (HIDDEN, N * V), (2, 4, N, R), (2, 4, N, V)
    report = mla_compile.explain(attention, *(torch.randn(shape) for shape in shapes))
    (site,) = report.sites
    assert site.path == "unchanged"
    assert "cache" not in site.reason.split(", at ")[0]
