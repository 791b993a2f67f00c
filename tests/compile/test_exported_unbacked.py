"""Exported programs with sizes that are known only at run time: rewritten and lowered, as right as eager."""

import copy

import pytest
import torch
from torch.export import Dim

import mla_compile
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, L, N, R, V
from tests.unbacked import Attention, first, from_one_on, some_queries

pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")


def masked(x, cache, number):
    """The first keys, under a mask of their own."""
    x, kept = first(x, cache, number)
    return x, kept, (torch.arange(cache.shape[1]) != 1)[None, : kept.shape[1]]


@pytest.mark.parametrize(
    ("take", "path"),
    [
        (from_one_on, "absorbed or chunked"),
        pytest.param(masked, "absorbed", marks=pytest.mark.slow),
        pytest.param(some_queries, "chunked", marks=pytest.mark.slow),
    ],
)
def test_rewritten_and_lowered_they_are_right(take, path):
    module = Attention(take)
    example = torch.randn(3, 4, HIDDEN), torch.randn(3, 12, L + R), torch.tensor(5)
    program = torch.export.export(module, example, dynamic_shapes=({1: Dim.AUTO}, {1: Dim.AUTO}, None))
    options = {"mla.path": path} if path == "absorbed" else {}
    rewritten = mla_compile.rewrite(program, options=options)
    (site,) = mla_compile.last_report().sites
    assert site.path == path
    runs = rewritten.module(), mla_compile.lower(rewritten).module()
    for queries, tokens, number in ((3, 9, 2), (7, 40, 6)):
        arguments = torch.randn(3, queries, HIDDEN), torch.randn(3, tokens, L + R), torch.tensor(number)
        eager = module(*arguments)
        exact = copy.deepcopy(module).double()(*(t.double() for t in arguments[:2]), arguments[2])
        for run in runs:
            assert_as_close_as_eager(run(*arguments), eager, exact)


def everything(x, cache, number):
    return x, cache


@pytest.mark.diagonal
@pytest.mark.parametrize(
    ("take", "queries", "number"), [(some_queries, 4, 0), (everything, 0, 2)], ids=["none counted", "none given"]
)
@pytest.mark.parametrize("path", ["absorbed", "chunked"])
def test_lowered_they_attend_with_no_query(path, take, queries, number):
    module = Attention(take)
    # More queries than heads: if the numbers were equal, torch 2.15 would fix that of queries, since a transposed view
    # is returned.
    example = torch.randn(3, N + 1, HIDDEN), torch.randn(3, 12, L + R), torch.tensor(2)
    program = torch.export.export(module, example, dynamic_shapes=({1: Dim("S", min=0, max=64)}, None, None))
    program = mla_compile.rewrite(program, options={"mla.path": path, "mla.strict": True})
    result = mla_compile.lower(program).module()(example[0][:, :queries], example[1], torch.tensor(number))
    assert result.shape == (3, N, 0, V)
