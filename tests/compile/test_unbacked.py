"""Sizes that only a run knows: elements of tensors (`.item()`) and counts (`nonzero`) in the place of lengths."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import mla_compile
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, L, N, P, R, V

CAPTURE = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


class Attention(nn.Module):
    """Queries of `x` [B, S, HIDDEN] attend to a cache [B, T, L + R], of which and of what `take` says."""

    def __init__(self, take):
        super().__init__()
        self.take = take
        self.q_proj = nn.Linear(HIDDEN, N * (P + R), bias=False)
        self.kv_b_proj = nn.Linear(L, N * (P + V), bias=False)

    def forward(self, x, cache, number):
        x, cache = self.take(x, cache, number)
        q = self.q_proj(x).unflatten(-1, (N, P + R)).transpose(1, 2)
        latent, k_rope = cache.split([L, R], dim=-1)
        k_nope, v = self.kv_b_proj(latent).unflatten(-1, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
        return scaled_dot_product_attention(q, k, v)


def first(x, cache, number):
    length = number.item()
    torch._check(length >= 1)
    torch._check(length <= cache.shape[1])
    return x, cache[:, :length]


def from_one_on(x, cache, number):
    start = number.item()
    torch._check(start >= 0)
    torch._check(start < cache.shape[1])
    return x, cache[:, start:]


def more(x, cache, number):
    count = number.item()
    torch._check(count >= 0)
    return x, torch.cat([cache, cache.new_ones(cache.shape[0], count, L + R)], dim=1)


def some_keys(x, cache, number):
    return x, cache[:, (torch.arange(cache.shape[1]) % number != 0).nonzero()[:, 0]]


def some_queries(x, cache, number):
    return x[:, (torch.arange(x.shape[1]) < number).nonzero()[:, 0]], cache


CASES = {
    "first": (first, 1, "absorbed"),
    "from one on": (from_one_on, 1, "absorbed"),
    "more": (more, 2, "absorbed"),
    "some keys": (some_keys, 1, "absorbed"),
    "some queries": (some_queries, 9, "chunked"),
}
"""What is taken, the number of queries, and the path."""


def check(take, queries):
    """Compare with float64 at several sizes, and return the sites of all compilations."""
    module = Attention(take)
    compiled = torch.compile(module, backend="mla", dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(CAPTURE):
        for tokens, number in ((12, 5), (40, 33), (12, 0) if take is some_queries else (12, 3)):
            arguments = torch.randn(3, queries, HIDDEN), torch.randn(3, tokens, L + R), torch.tensor(number)
            result, eager = compiled(*arguments), module(*arguments)
            exact = copy.deepcopy(module).double()(*(t.double() for t in arguments[:2]), arguments[2])
            if eager.numel():
                assert_as_close_as_eager(result, eager, exact)
            assert result.shape == eager.shape
    return [site for report in mla_compile.reports() for site in report.sites]


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(("take", "queries", "path"), CASES.values(), ids=CASES)
def test_a_size_that_only_a_run_knows_is_no_obstacle(take, queries, path):
    (site,) = check(take, queries)
    assert site.path == path
    assert not any("u0" in guard for guard in site.guards)
    assert take is not some_queries or site.reason.endswith("taking u0 for 8192"), site.reason


@pytest.mark.slow
def test_so_it_is_in_generated_code():
    (site,) = check(first, 1)
    assert site.path == "absorbed"
