"""The ops on CPU tensors of random sizes, strides and offsets, against float64.

Memory between and around the numbers of an input holds NaN, so that a kernel that reads it gives a wrong result.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from mla_compile.kernels.expanded_attention import expanded_attention_reference
from mla_compile.kernels.latent_attention import latent_attention_reference
from mla_compile.kernels.per_head_matmul import per_head_matmul_reference

from .errors import assert_as_close_as

mla = torch.ops.mla
SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 60))]
DTYPES = [torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16]


class Draw:
    """Random sizes and tensors from a seed."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.dtype = self.source.choice(DTYPES)

    def size(self, *sizes: int) -> int:
        return self.source.choice(sizes)

    def tensor(self, *shape: int, dense_last: bool = False) -> Tensor:
        """A random tensor with NaN around it in its storage: dims in any order, steps, offsets, or an expanded dim.

        With `dense_last` the last dim has stride 1, as in a slice of a cache.
        """
        source, rank = self.source, len(shape)
        kind = source.choice(["contiguous", "slice", "any", "expanded"])
        if kind == "contiguous":
            return torch.randn(shape).to(self.dtype)
        order = list(range(rank))
        if kind == "any":
            movable = order[: rank - 1] if dense_last else order
            source.shuffle(movable)
            order[: len(movable)] = movable
        steps = [1 if dense_last and i == rank - 1 else source.choice([1, 1, 2]) for i in range(rank)]
        before = [source.choice([0, 1, 3]) for _ in shape]
        extents = [b + n * step + source.choice([0, 2]) for n, step, b in zip(shape, steps, before, strict=True)]
        storage = torch.full([extents[i] for i in order], torch.nan).to(self.dtype)
        view = storage.permute([order.index(i) for i in range(rank)])
        places = zip(shape, steps, before, strict=True)
        view = view[tuple(slice(b, b + n * step, step) for n, step, b in places)]
        assert view.shape == shape
        view.copy_(torch.randn(shape).to(self.dtype))
        if kind == "expanded":
            dim = source.randrange(rank - 1 if dense_last else rank)
            view = view.narrow(dim, 0, 1).expand(shape) if shape[dim] else view
        return view

    def mask(self, batch: int, heads: int, queries: int, keys: int) -> tuple[Tensor | None, int | None]:
        offset = self.source.choice([None, keys - queries, keys - queries, -1, 3])
        kind = self.source.choice(["none", "none", "bool", "bias"])
        if kind == "none":
            return None, offset
        shape = [self.source.choice([1, size]) for size in (batch, heads, queries)] + [keys]
        if kind == "bool":
            return torch.rand(shape) < self.source.choice([0.0, 0.5, 0.9, 1.0]), offset
        bias = torch.randn(shape).masked_fill(torch.rand(shape) < 0.2, -torch.inf)
        return bias.to(self.dtype), offset


def double(*arguments: object) -> tuple[object, ...]:
    return tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments)


def assert_right(results: tuple[Tensor, Tensor], measure: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    for result, of_dtype, true in zip(results, measure, exact, strict=True):
        assert result.shape == true.shape
        if result.numel():
            assert_as_close_as(of_dtype.to(result.dtype), result, true, merges=64)


@pytest.mark.parametrize("seed", SEEDS)
def test_latent_attention(seed: int) -> None:
    torch.manual_seed(seed)
    x = Draw(seed)
    batch, queries, heads = x.size(0, 1, 1, 2, 3), x.size(0, 1, 1, 2, 5), x.size(1, 2, 3, 17, 40)
    keys, rank, rope = x.size(0, 1, 2, 63, 64, 65, 150), x.size(1, 7, 16, 33, 64), x.size(0, 1, 6, 16)
    q = x.tensor(batch, queries, heads, rank), x.tensor(batch, queries, heads, rope)
    cache = x.tensor(batch, keys, rank, dense_last=True), x.tensor(batch, keys, rope, dense_last=True)
    arguments = *q, *cache, *x.mask(batch, heads, queries, keys), (rank + rope) ** -0.5
    exact = latent_attention_reference(*double(*arguments))
    assert_right(mla.latent_attention(*arguments), latent_attention_reference(*arguments), exact)


@pytest.mark.parametrize("seed", SEEDS)
def test_expanded_attention(seed: int) -> None:
    torch.manual_seed(seed)
    x = Draw(seed)
    batch, queries, heads = x.size(0, 1, 1, 2), x.size(0, 1, 2, 31, 32, 33, 70), x.size(1, 2, 5)
    keys, rank = x.size(0, 1, 2, 95, 96, 97, 130), x.size(1, 7, 16, 33)
    nope, rope, value = x.size(1, 5, 16), x.size(0, 1, 6, 16), x.size(1, 5, 16, 35)
    q, cache = x.tensor(batch, queries, heads, nope + rope), (x.tensor(batch, keys, rank), x.tensor(batch, keys, rope))
    weights = x.tensor(heads, nope, rank), x.tensor(heads, value, rank)
    arguments = q, *cache, *weights, *x.mask(batch, heads, queries, keys), (nope + rope) ** -0.5, x.size(1, 7, 64, 1000)
    results = mla.expanded_attention(*arguments)
    exact = expanded_attention_reference(*double(*arguments))
    assert_right(results, expanded_attention_reference(*arguments), exact)


@pytest.mark.parametrize("seed", SEEDS)
def test_per_head_matmul(seed: int) -> None:
    torch.manual_seed(seed)
    x = Draw(seed)
    batch, queries, heads = x.size(0, 1, 1, 2), x.size(0, 1, 1, 2, 3), x.size(0, 1, 2, 7)
    inner, outer = x.size(0, 1, 2, 15, 33, 64), x.size(0, 1, 2, 15, 33, 64)
    rows = x.tensor(batch, queries, heads, inner)
    by_column = x.source.random() < 0.5
    weight = x.tensor(heads, outer, inner).mT if by_column else x.tensor(heads, inner, outer)
    result = mla.per_head_matmul(rows, weight)
    exact, measure = per_head_matmul_reference(*double(rows, weight)), per_head_matmul_reference(rows, weight)
    assert_right((result,), (measure,), (exact,))


def test_chunks_of_no_key_under_a_bias() -> None:
    q, cache, weight = torch.randn(1, 3, 2, 8), torch.randn(1, 0, 12), torch.randn(2, 4, 8)
    bias = torch.zeros(1, 1, 3, 0)
    o, lse = mla.expanded_attention(q, cache[..., :8], cache[..., 8:], weight, weight, bias, None, 1.0, 64)
    assert torch.equal(o, torch.zeros(1, 3, 2, 4))
    assert torch.equal(lse, torch.full((1, 3, 2), -torch.inf))


def test_a_row_of_no_head() -> None:
    assert mla.per_head_matmul(torch.randn(1, 1, 0, 4), torch.randn(0, 4, 5)).shape == (1, 1, 0, 5)
