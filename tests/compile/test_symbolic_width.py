"""Queries that are an input, as behind a graph break: once sizes vary, the head width is a symbol, and any may be 0."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_compile
from tests.errors import assert_as_close_as_eager

N, P, R, V, L = 4, 8, 6, 8, 16


def attend(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
    k, v = F.linear(latent, weight).unflatten(-1, (N, P + V)).transpose(1, 2).split([P, V], -1)
    return F.scaled_dot_product_attention(q, torch.cat([k, k_rope[:, None].expand(-1, N, -1, -1)], -1), v)


@pytest.mark.usefixtures("without_codegen")
def test_the_scale_follows_from_a_guard_on_the_width() -> None:
    torch.manual_seed(0)
    compiled, weight = torch.compile(attend, backend="mla", dynamic=True), torch.randn(N * (P + V), L)
    for queries, keys in ((5, 24), (5, 33), (7, 40)):
        given = torch.randn(2, N, queries, P + R), torch.randn(2, keys, L), torch.randn(2, keys, R), weight
        expected = attend(*(t.double() for t in given))
        assert_as_close_as_eager(compiled(*given), attend(*given), expected)
    assert [site.path for report in mla_compile.reports() for site in report.sites] == ["absorbed"]


def roped(x: Tensor) -> Tensor:
    """A rope as DeepSeek-V2's own code writes it: pairs are taken apart first, by views of half of a width."""
    batch, heads, tokens, width = x.shape
    x = x.view(batch, heads, tokens, width // 2, 2).transpose(4, 3).reshape(batch, heads, tokens, width)
    angles = torch.arange(tokens)[:, None] * torch.arange(1, R + 1).to(x.dtype)
    half = x.shape[-1] // 2
    return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()


def attend_by_two_products(q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
    k, v = F.linear(latent, weight).unflatten(-1, (N, P + V)).transpose(1, 2).split([P, V], -1)
    scores = q @ k.mT + roped(q_rope) @ roped(k_rope[:, None]).mT
    return (scores * (P + R) ** -0.5).softmax(-1) @ v


@pytest.mark.usefixtures("without_codegen")
def test_a_rope_of_a_width_that_a_guard_knows() -> None:
    """Once pairs are taken apart, torch has the width as `w // 2 * (w // (w // 2))`, and a guard on each of the two."""
    torch.manual_seed(0)
    compiled = torch.compile(attend_by_two_products, backend="mla", dynamic=True)
    weight = torch.randn(N * (P + V), L)
    for queries, keys in ((5, 24), (7, 40)):
        q, latents = torch.randn(2, queries, N, P + R).transpose(1, 2), torch.randn(2, keys, L + R)
        given = *q.split([P, R], -1), *latents.split([L, R], -1), weight
        expected = attend_by_two_products(*(t.double() for t in given))
        assert_as_close_as_eager(compiled(*given), attend_by_two_products(*given), expected)
    (site,) = (site for report in mla_compile.reports() for site in report.sites)
    assert (site.path, site.mask, site.shapes["R"]) == ("absorbed", "none", str(R))


@pytest.mark.usefixtures("without_codegen")
def test_of_nothing_it_says_so() -> None:
    compiled = torch.compile(attend, backend="mla", dynamic=True)
    for keys in (24, 0):
        o = compiled(torch.randn(2, N, 5, P + R), torch.randn(2, keys, L), torch.randn(2, keys, R), torch.randn(64, L))
        assert o.shape == (2, N, 5, V)
    assert "found an empty tensor" in mla_compile.last_report().sites[0].reason
