"""Lengths that are known only at run time: elements of tensors (`.item()`) and counts (`nonzero`)."""

import copy

import pytest
import torch

import mla_compile
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, Combined, L, R
from tests.unbacked import Attention, first, from_one_on, more, some_keys, some_queries

CAPTURE = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}

CASES = {
    "first": (first, 1, "absorbed"),
    "from one on": (from_one_on, 1, "absorbed"),
    "more": (more, 2, "absorbed"),
    "some keys": (some_keys, 1, "absorbed"),
    "some queries": (some_queries, 9, "chunked"),
}
"""What is selected, the number of queries, and the path."""
SOME = [
    pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in ("from one on", "some keys") else [])
    for name, case in CASES.items()
]


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
@pytest.mark.parametrize(("take", "queries", "path"), SOME)
def test_a_size_that_only_a_run_knows_is_no_obstacle(take, queries, path):
    (site,) = check(take, queries)
    assert site.path == path
    assert not any("u0" in guard for guard in site.guards)
    assert take is not some_queries or site.reason.endswith("taking u0 for 8192"), site.reason


@pytest.mark.slow
def test_a_size_that_only_a_run_knows_in_generated_code():
    (site,) = check(first, 1)
    assert site.path == "absorbed"


@pytest.mark.usefixtures("without_codegen")
def test_lengths_that_are_marked_unbacked_are_equal_where_a_run_asserts_it():
    module = Combined()
    compiled = torch.compile(module, backend="mla", fullgraph=True)
    for tokens in (12, 40):
        x, cache = torch.randn(3, 1, HIDDEN), (torch.randn(3, tokens, L), torch.randn(3, tokens, R))
        for part in cache:
            torch._dynamo.decorators.mark_unbacked(part, 1)
        exact = copy.deepcopy(module).double()(x.double(), tuple(part.double() for part in cache))
        assert_as_close_as_eager(compiled(x, cache)[0], module(x, cache)[0], exact[0])
    (site,) = [site for report in mla_compile.reports() for site in report.sites]
    assert site.path == "absorbed"
    shorter = cache[1][:, 1:].clone()
    torch._dynamo.decorators.mark_unbacked(shorter, 1)
    with pytest.raises(RuntimeError):  # as in eager
        compiled(x, (cache[0], shorter))
    assert len(mla_compile.reports()) == 1


@pytest.mark.usefixtures("without_codegen")
def test_sizes_that_a_run_asserts_to_be_equal_are_no_obstacle():
    module = Combined()
    compiled = torch.compile(module, backend="mla")
    with torch._dynamo.config.patch(prefer_deferred_runtime_asserts_over_guards=True):
        for tokens in (12, 13, 40):
            x, cache = torch.randn(3, 1, HIDDEN), (torch.randn(3, tokens, L), torch.randn(3, tokens, R))
            torch.testing.assert_close(compiled(x, cache), module(x, cache))
    sites = [site for report in mla_compile.reports() for site in report.sites]
    assert [site.path for site in sites] == ["absorbed", "absorbed"]
    assert all(f"{4 * (L + R)} bytes per token" in site.hint for site in sites)
