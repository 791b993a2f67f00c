"""Pages whose size is a symbol, compiled with `dynamic=True`: read where they are, under a guard on their size."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_compile
from tests.errors import assert_as_close_as_eager

B, N, L, P, R, V, PAGES = 2, 4, 32, 16, 8, 16, 40


@dataclass
class Cache:
    """Pages `[PAGES, page_size, L + R]`, a table `[B, entries]`, and numbers that Dynamo makes symbols of."""

    pool: Tensor
    table: Tensor
    page_size: int
    length: int

    @classmethod
    def of(cls, page_size: int, length: int) -> Cache:
        table = torch.randperm(PAGES)[: B * (PAGES // B)].view(B, -1)
        return cls(torch.randn(PAGES, page_size, L + R), table, page_size, length)

    def double(self) -> Cache:
        return Cache(self.pool.double(), self.table, self.page_size, self.length)


def by_position(cache: Cache) -> Tensor:
    position = torch.arange(cache.length)
    return cache.pool[cache.table[:, position // cache.page_size], position % cache.page_size]


def by_position_in_a_page_of_the_pool(cache: Cache) -> Tensor:
    """The page size is taken from the shape of the pool, and is not a symbol of its own."""
    position, size = torch.arange(cache.length), cache.pool.shape[1]
    return cache.pool[cache.table[:, position // size], position % size]


def whole_pages(cache: Cache) -> Tensor:
    return cache.pool[cache.table].flatten(1, 2)


def attend(q: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    latent, k_rope = keys.split([L, R], dim=-1)
    k_nope, v = (latent @ weight.T).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    "read", [by_position, pytest.param(by_position_in_a_page_of_the_pool, marks=pytest.mark.slow), whole_pages]
)
def test_the_pages_are_read_and_another_size_of_them_is_right_too(read) -> None:
    def step(q: Tensor, weight: Tensor, cache: Cache) -> Tensor:
        return attend(q, weight, read(cache))

    compiled = torch.compile(step, backend="mla", dynamic=True, fullgraph=True)
    for page_size, length in ((16, 300), (16, 301), (8, 150)):
        q, weight = torch.randn(B, N, 3, P + R), torch.randn(N * (P + V), L) / L**0.5
        cache = Cache.of(page_size, length)
        exact = step(q.double(), weight.double(), cache.double())
        assert_as_close_as_eager(compiled(q, weight, cache), step(q, weight, cache), exact)
        (site,) = mla_compile.last_report().sites
        assert "reads the pages" in site.reason
    assert len(mla_compile.reports()) <= 2  # one for each size of pages at most


def test_two_sizes_that_differ_now_are_no_pages() -> None:
    """A divisor that is not the size of a page reads other tokens."""

    def step(q: Tensor, weight: Tensor, cache: Cache) -> Tensor:
        return attend(q, weight, by_position(cache))

    cache = Cache.of(16, 130)
    cache.page_size = 8
    q, weight = torch.randn(B, N, 3, P + R), torch.randn(N * (P + V), L) / L**0.5
    exact = step(q.double(), weight.double(), cache.double())
    compiled = torch.compile(step, backend="mla", dynamic=True, fullgraph=True)
    assert_as_close_as_eager(compiled(q, weight, cache), step(q, weight, cache), exact)
    (site,) = mla_compile.last_report().sites
    assert "reads the pages" not in site.reason
    cache.page_size = 16
    exact = step(q.double(), weight.double(), cache.double())
    assert_as_close_as_eager(compiled(q, weight, cache), step(q, weight, cache), exact)


def test_a_table_takes_pages_where_all_numbers_are_symbols():
    """Inductor has to bound positions divided by a page size, of which each may be as large as any number."""

    def step(table: mla_compile.BlockTable, tokens: Tensor) -> Tensor:
        table.extend(tokens.shape[1])
        table.write(0, tokens)
        return table.read(0)

    compiled = torch.compile(step, backend="mla", dynamic=True, fullgraph=True)
    for page_size in (8, 3):
        table = mla_compile.BlockTable(mla_compile.PagePool(1, L, R, pages=12, page_size=page_size), B)
        tokens = torch.randn(B, 9, L + R)
        for part in tokens.split([5, 3, 1], dim=1):
            read = compiled(table, part)
            assert torch.equal(read, tokens[:, : read.shape[1]])
        assert read.shape[1] == 9
