"""Caches that are copied as they grow use memory again: which of a graph's joins, and what the graph computes then."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import mla_compile
from mla_compile.inductor.growing_caches import use_memory_again
from tests.errors import DRAWS, assert_as_close_as_eager_on_average
from tests.models import HIDDEN, Combined, L, R

TOKENS = 10_000
"""So many that latents of two sequences are more than the least that uses memory again."""


def traced(function, *inputs) -> fx.GraphModule:
    module = make_fx(function, tracing_mode="fake")(*inputs)
    use_memory_again(module)
    return module


def grown(module: fx.GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=torch.ops.mla.grow_cache.default))


def join(past: Tensor, new: Tensor) -> Tensor:
    return torch.cat([past, new], 1)


PAST, NEW = torch.ones(2, TOKENS, L), torch.ones(2, 1, L)
OTHERS = {
    "three": (lambda past, new: torch.cat([past, new, new], 1), PAST, NEW),
    "new first": (lambda past, new: torch.cat([new * 2, past], 1), PAST, NEW),
    "not returned": (lambda past, new: torch.cat([past, new], 1).sum(), PAST, NEW),
    "not kept before": (lambda past, new: torch.cat([past * 2, new], 1), PAST, NEW),
    "promoted": (join, PAST.bfloat16(), NEW),
    "small": (join, PAST[:, :100], NEW),
    "another device": (join, PAST.to("meta"), NEW.to("meta")),
    "channels last": (
        lambda past, new: torch.cat([past, new], 2),
        PAST.view(2, 1, TOKENS, L).expand(2, 3, TOKENS, L).contiguous(memory_format=torch.channels_last),
        NEW.view(2, 1, 1, L).expand(2, 3, 1, L).contiguous(memory_format=torch.channels_last),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_joins_stay(name):
    assert grown(traced(*OTHERS[name])) == 0


@pytest.mark.parametrize("dim", [1, -2])
def test_a_cache_that_grows_is_found(dim):
    def step(past: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat([past, new * 2], dim)
        return whole, whole.sum(1)

    module = traced(step, PAST, NEW)
    assert grown(module) == 1
    for actual, expected in zip(module(PAST, NEW), step(PAST, NEW), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.usefixtures("without_codegen")
def test_steps_of_compiled_attention_take_turns():
    """The first step has static sizes, all others symbolic ones: each returns what eager does."""
    model = Combined()
    compiled, exact = torch.compile(model, backend="mla"), copy.deepcopy(model).double()
    cache = torch.randn(2, TOKENS, L), torch.randn(2, TOKENS, R)
    places, results = [], []
    for x in torch.randn(DRAWS, 2, 1, HIDDEN):
        expected, cache_of_eager = model(x, cache)
        right, _ = exact(x.double(), tuple(part.double() for part in cache))
        out, cache = compiled(x, cache)
        assert [site.path for site in mla_compile.last_report().sites] == ["absorbed"]
        for part, of_eager in zip(cache, cache_of_eager, strict=True):
            torch.testing.assert_close(part, of_eager)
        results.append((out, expected, right))
        places.append(cache[0].data_ptr())
    assert_as_close_as_eager_on_average(*zip(*results, strict=True))
    settled = places[4:]  # compiling keeps its inputs alive
    assert settled[2:] == settled[:-2]
    assert len(set(settled)) == 2
