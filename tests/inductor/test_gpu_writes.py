"""Rows that are joined to be written or split: each part is written by itself, with the same result."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.inductor.gpu_writes import write_in_parts

aten = torch.ops.aten
L, R, W = 6, 2, 8
PAGE, ROW = torch.tensor([3, 0]), torch.tensor([1, 2])
POOL = torch.arange(4 * 5 * W, dtype=torch.float32).view(4, 5, W)
LATENT, ROPE = 1000 + torch.rand(2, 1, L), 2000 + torch.rand(2, 1, R)


def straight(pool, latent, rope):
    return aten.index_put(pool, [PAGE, ROW], torch.cat([latent, rope], -1)[:, 0])


def one_place(pool, latent, rope):
    """Joined along the last dimension by its positive number, and viewed as rows."""
    return aten.index_put(pool, [PAGE, ROW], torch.cat([latent, rope], 2).view(2, W))


def table(pool, latent, rope):
    """Indices with two dimensions."""
    return aten.index_put(pool, [PAGE[:, None], ROW[:, None]], torch.cat([latent, rope], -1))


def one_dimension(pool, latent, rope):
    return aten.index_put(pool.view(20, W), [PAGE * 5 + ROW], torch.cat([latent, rope], -1).squeeze(1))


def three(pool, latent, rope):
    return aten.index_put(pool, [PAGE, ROW], torch.cat([latent[..., :4], latent[..., 4:], rope], -1).reshape(2, W))


def cut(pool, latent, rope):
    first, second = torch.cat([latent, rope], -1)[:, 0].split_with_sizes([L, R], -1)
    return first * 2, second + 1


def traced(function, *tensors):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return make_fx(function)(*map(mode.from_tensor, tensors))


def count(module, op):
    return len(module.graph.find_nodes(op="call_function", target=op))


@pytest.mark.parametrize("function", [straight, one_place, table, one_dimension, three, cut])
def test_parts_are_written_as_the_row_was(function):
    module = traced(function, POOL, LATENT, ROPE)
    assert count(module, aten.cat.default) == 1
    assert write_in_parts(module.graph)
    module.graph.lint()
    module.recompile()
    assert count(module, aten.cat.default) == 0
    given = POOL.clone()
    for actual, wanted in zip(module(given, LATENT, ROPE), function(POOL, LATENT, ROPE), strict=True):
        assert torch.equal(actual, wanted)
    assert torch.equal(given, POOL)


def used_elsewhere(pool, latent, rope):
    row = torch.cat([latent, rope], -1)
    return aten.index_put(pool, [PAGE, ROW], row[:, 0]), row + 1


def accumulated(pool, latent, rope):
    return aten.index_put(pool, [PAGE, ROW], torch.cat([latent, rope], -1)[:, 0], True)


def whole_pages(pool, latent, rope):
    return aten.index_put(pool, [PAGE], torch.cat([latent, rope], -1))


def other_tokens(pool, latent, rope):
    """All latents, then all rope keys: columns of the rows are not those of the parts."""
    return aten.index_put(pool, [PAGE, ROW], torch.cat([latent.flatten(), rope.flatten()]).view(2, W))


def masked(pool, latent, rope):
    return aten.index_put(pool.view(20, W), [torch.arange(20) % 10 == 3], torch.cat([latent, rope], -1)[:, 0])


def over_columns(pool, latent, rope):
    """A view with as many columns, which are others."""
    return aten.index_put(pool, [PAGE, ROW], torch.cat([latent, rope], -1)[:, 0].view(W, 2).t().reshape(2, W))


def cut_elsewhere(pool, latent, rope):
    return torch.cat([latent, rope], -1).split_with_sizes([R, L], -1)


@pytest.mark.parametrize(
    "function", [used_elsewhere, accumulated, whole_pages, other_tokens, masked, over_columns, cut_elsewhere]
)
def test_other_rows_stay(function):
    module = traced(function, POOL, LATENT, ROPE)
    before = str(module.graph)
    assert not write_in_parts(module.graph)
    assert str(module.graph) == before


def test_sizes_that_are_symbols_stay():
    def write(pool, latent, rope, page, row):
        return aten.index_put(pool, [page, row], torch.cat([latent, rope], -1)[:, 0])

    module = make_fx(write, tracing_mode="symbolic")(POOL, LATENT, ROPE, PAGE, ROW)
    assert not write_in_parts(module.graph)
