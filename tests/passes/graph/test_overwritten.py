"""Writes to all of a tensor are dropped, unless the result would share memory with what it must be apart from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_compile.passes.graph.overwritten import drop_overwritten
from tests.passes.graphs import capture, run

ALL = 0, 0, 9223372036854775807
slice_scatter = torch.ops.aten.slice_scatter


def dropped(function: Callable[[Tensor, Tensor], object]) -> bool:
    x, y = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    module = capture(function, x, y)
    before = run(module, x, y)
    drop_overwritten(module.graph, {})
    module.recompile()
    after = run(module, x, y)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    results = [tensor.untyped_storage().data_ptr() for tensor in (*torch.utils._pytree.tree_leaves(after), x, y)]
    assert len(set(results)) == len(results)
    return not module.graph.find_nodes(op="call_function", target=slice_scatter.default)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: slice_scatter(x, y.exp(), *ALL),
        lambda x, y: slice_scatter(torch.empty_like(x), y.exp().view(6, 4).view(2, 3, 4), *ALL),
        lambda x, y: slice_scatter(slice_scatter(x, y.exp(), *ALL), x.exp(), *ALL),
    ],
)
def test_what_is_written_is_the_result(function: Callable[[Tensor, Tensor], object]) -> None:
    assert dropped(function)


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = y.exp()
    return slice_scatter(x, z, *ALL), z


def a_view_and_its_base(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = y.exp()
    return slice_scatter(x, z.view(6, 4).view(2, 3, 4), *ALL), z


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: slice_scatter(x, y, *ALL),
        lambda x, y: slice_scatter(x, y.view(6, 4).view(2, 3, 4), *ALL),
        lambda x, y: slice_scatter(x, y.exp()[:1], 0, 0, 1),
        lambda x, y: slice_scatter(x, y.exp().double(), *ALL),
        lambda x, y: slice_scatter(x, y.mT.exp().contiguous().mT.reshape(2, 4, 3).mT, *ALL),
        both,
        a_view_and_its_base,
    ],
)
def test_what_is_an_input_or_is_used_elsewhere_stays_apart(function: Callable[[Tensor, Tensor], object]) -> None:
    assert not dropped(function)
