"""`lower` says where a program holds for fewer sizes than its ranges allow."""

import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim

import mla_compile

pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")


def program(forward, *sizes, dims=("S", "T")):
    class Module(nn.Module):
        def forward(self, *given):
            return forward(*given)

    named = {"S": Dim("S", min=1, max=40), "T": Dim("T", min=2, max=80)}
    shapes = tuple({0: named[name]} for name in dims)
    return torch.export.export(Module(), tuple(torch.ones(n) for n in sizes), dynamic_shapes=(shapes,))


def grown(new, cache):
    """A buffer with room for twice as many, unless that is too little."""
    count = new.shape[0] + cache.shape[0]
    return torch.cat([new, cache, cache.new_zeros(1 if count < 2 * cache.shape[0] else count)])


def test_a_side_that_was_chosen_for_the_example():
    chosen = program(grown, 3, 7)
    where = r"only where given_0\.shape\[0\] \+ given_1\.shape\[0\] < 2\*given_1\.shape\[0\], which is not so for all"
    with pytest.warns(UserWarning, match=where):
        lowered = mla_compile.lower(chosen)
    assert lowered.module()(torch.ones(2), torch.ones(9)).shape == (12,)


HOLDS = {
    "a choice that is the same for all sizes": lambda: program(
        lambda x, y: x.sum() if x.shape[0] + y.shape[0] > x.shape[0] else y.sum(), 3, 7
    ),
    "sizes that are one": lambda: program(lambda x, y: x + y, 5, 5, dims=("S", "S")),
    "no choice": lambda: program(lambda x, y: torch.cat([x, y]).view(-1, 1), 3, 7),
}


@pytest.mark.parametrize("make", HOLDS.values(), ids=HOLDS)
def test_nothing_is_said_where_it_holds(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        mla_compile.lower(make())


def test_static_sizes():
    class Module(nn.Module):
        def forward(self, x):
            return x + 1

    mla_compile.lower(torch.export.export(Module(), (torch.ones(3),)))
