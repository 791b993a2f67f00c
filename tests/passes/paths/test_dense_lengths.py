"""A dense cache under a mask of lengths is treated as one page per sequence, and read up to these lengths.

Prefill does so on any device, decoding on a GPU.
"""

import itertools

import pytest
import torch

from tests.passes.caches.test_pages import OPS, PAGED, L, R, attend, inputs
from tests.passes.graphs import capture, on_a_gpu, rewrite, run
from tests.passes.masks.test_bounds import LENGTHS, NEAR_MISSES, SPELLINGS, T

DENSE = torch.ops.mla.latent_attention.default
CHUNKED = torch.ops.mla.expanded_attention.default


def rewritten(mask, queries, path="absorbed"):
    """The attention ops of the graph after the passes. Asserts that the results are the same, in float64."""
    q, _, _, weight = (t.double() for t in inputs(queries=queries))
    cache = torch.randn(2, T, L + R, dtype=torch.float64)

    def decode(q, cache, weight, lengths):
        return attend(q, cache, weight, mask=mask(lengths, queries))

    module = capture(decode, q, cache, weight, torch.tensor(LENGTHS[0]))
    (outcome,) = rewrite(module, path)
    assert outcome.path == path
    for lengths in map(torch.tensor, LENGTHS):
        given = q, cache, weight, lengths
        torch.testing.assert_close(run(module, *given), decode(*given), rtol=0, atol=1e-13)
    return [node for node in module.graph.nodes if node.target in (*OPS.values(), DENSE, CHUNKED)]


@on_a_gpu()
@pytest.mark.diagonal
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_lengths_take_the_place_of_a_mask(spelling, queries):
    mask, _, causal = spelling
    (op,) = rewritten(mask, queries)
    assert op.target is PAGED
    latent_pages, table = op.args[2], op.args[4]
    assert latent_pages.meta["val"].shape == (2, T, L)
    given = itertools.takewhile(lambda node: node is not op, op.graph.nodes)
    assert not any(node.target is torch.ops.aten.clone.default for node in given)
    assert table.meta["val"].shape == (2, 1)
    assert op.args[6] == (causal and queries > 1)
    assert op.kwargs.get("mask") is None
    assert not any(getattr(n.meta["val"], "dtype", None) == torch.bool for n in op.graph.nodes if n.op != "output")


@on_a_gpu()
@pytest.mark.parametrize("mask", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_what_is_no_number_of_keys_stays_a_mask(mask):
    (op,) = rewritten(mask, 3)
    assert op.target is DENSE
    assert op.args[4] is not None


@on_a_gpu()
def test_a_limit_that_the_graph_knows_stays_an_offset():
    (op,) = rewritten(lambda n, q: torch.arange(T) <= torch.arange(q)[:, None] + 6, 3)
    assert (op.target, op.args[4], op.args[5]) == (DENSE, None, 6)


def test_a_cpu_looks_at_the_mask():
    (op,) = rewritten(SPELLINGS["before the length"][0], 1)
    assert op.target is DENSE


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_lengths_take_the_place_of_a_mask_over_chunks(spelling):
    mask, _, causal = spelling
    (op,) = rewritten(mask, 3, "chunked")
    assert op.target is OPS["chunked"]
    assert op.args[1].meta["val"].shape == (2, T, L)
    assert op.args[3].meta["val"].shape == (2, 1)
    assert op.args[7] == causal
    assert not any(getattr(n.meta["val"], "dtype", None) == torch.bool for n in op.graph.nodes if n.op != "output")


@pytest.mark.parametrize("mask", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_what_is_no_number_of_keys_stays_a_mask_over_chunks(mask):
    (op,) = rewritten(mask, 3, "chunked")
    assert op.target is CHUNKED
    assert op.args[5] is not None


def test_a_limit_that_the_graph_knows_stays_an_offset_over_chunks():
    (op,) = rewritten(lambda n, q: torch.arange(T) <= torch.arange(q)[:, None] + 6, 3, "chunked")
    assert (op.target, op.args[5], op.args[6]) == (CHUNKED, None, 6)
