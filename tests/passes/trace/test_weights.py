"""Up-projections with weights in int8 or FP8: absorbed through the dequantisation, wherever it is written."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_right, unfolded
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import Function, N, P, V

OUT = N * (P + V)


def quantized(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight [OUT, L] in int8 or FP8, and a scale [OUT, 1] for each of its rows."""
    weight = mla.tensors()[4].t()
    most = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = weight.abs().amax(1, keepdim=True) / most
    few = weight / scale
    return (few.round() if dtype == torch.int8 else few).to(dtype), scale


def scaled_before(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """The weight is dequantised before the product."""
    return mla.combined(x, latent, k_rope, w_q, (w.to(scale.dtype) * scale).t())


def scaled_in_blocks(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """A scale for every block of 5 rows and all columns."""
    blocks = scale[::5].repeat_interleave(5, 0)
    return mla.combined(x, latent, k_rope, w_q, (w.to(scale.dtype) * blocks).t())


def scaled_after(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """The product is scaled, by one scale for each row of the weight."""
    kv = ((latent @ w.to(scale.dtype).t()) * scale.squeeze(1)).view(-1, mla.T, N, P + V).transpose(1, 2)
    k_nope, v = kv.split([P, V], -1)
    return mla.softmax(mla.queries(x, w_q), torch.cat([k_nope, mla.to_heads(k_rope)], -1), v)


def scaled_by_head(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """The product is scaled by one scale for each head, after the split into heads."""
    kv = (latent @ w.to(scale.dtype).t()).view(-1, mla.T, N, P + V).transpose(1, 2)
    k_nope, v = (kv * scale.view(N, P + V, 1)[:, :1]).split([P, V], -1)
    return mla.softmax(mla.queries(x, w_q), torch.cat([k_nope, mla.to_heads(k_rope)], -1), v)


SPELLINGS = [scaled_before, scaled_in_blocks, scaled_after, scaled_by_head]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("function", SPELLINGS)
def test_a_site_is_absorbed_through_its_dequantisation(function: Function, dtype: torch.dtype) -> None:
    inputs = (*mla.tensors()[:4], *quantized(dtype))
    traced = capture(function, *inputs)
    before = run(traced, *inputs)
    for path in ("absorbed", "chunked"):
        module = torch.fx.GraphModule(traced, copy.deepcopy(traced.graph))
        (outcome,) = rewrite(module, path)
        assert outcome.path == path, outcome.reason
        assert not unfolded(module)
        check_right(before, run(module, *inputs))


@pytest.mark.parametrize("function", SPELLINGS)
def test_one_row_is_multiplied_where_its_weight_is_made(function: Function) -> None:
    """No op needs the dequantised weight in memory: Inductor generates one loop for both."""
    inputs = (*mla.tensors(batch=1, queries=1)[:4], *quantized(torch.int8))
    module = capture(function, *inputs)
    before = run(module, *inputs)
    (outcome,) = rewrite(module)
    assert outcome.rewritten
    assert not [node for node in module.graph.nodes if node.target is torch.ops.mla.per_head_matmul.default]
    check_right(before, run(module, *inputs))


def test_a_scale_of_each_token_is_no_part_of_the_weight() -> None:
    """The keys are scaled after the product, each key by its own scale: they have a latent of their own."""

    def function(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        kv = (latent @ w.to(scale.dtype).t()).view(-1, mla.T, N, P + V).transpose(1, 2)
        k_nope, v = kv.split([P, V], -1)
        k_nope = k_nope * scale[: mla.T]
        return mla.softmax(mla.queries(x, w_q), torch.cat([k_nope, mla.to_heads(k_rope)], -1), v)

    inputs = (*mla.tensors()[:4], *quantized(torch.int8))
    module = capture(function, *inputs)
    before = run(module, *inputs)
    (outcome,) = rewrite(module)
    assert outcome.rewritten
    assert outcome.shapes["Lk"] == outcome.shapes["L"]
    check_right(before, run(module, *inputs))
