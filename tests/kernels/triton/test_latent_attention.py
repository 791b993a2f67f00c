"""The Triton kernel of mla::latent_attention, against the reference in float64."""

import pytest
import torch

from mla_compile.kernels._common.tiles import Tiles
from mla_compile.kernels.latent_attention import latent_attention_reference
from mla_compile.kernels.latent_attention.arguments import LatentAttention
from mla_compile.kernels.latent_attention.triton import latent_attention_triton

from ..errors import assert_as_close_as
from ..naive import MASKS, case_of, make_inputs
from ..test_latent_attention import double
from .where import ON_GPU, machine, to_device

pytestmark = [*ON_GPU]

TILES = Tiles(rows=16, keys=16, warps=4, stages=2)

# B, Sq, T, N, L, P, R, V
SIZES = {
    "decode": (1, 1, 150, 4, 24, 8, 8, 8),
    "several tokens": (2, 5, 40, 4, 33, 5, 7, 9),
    "no rope": (2, 2, 20, 2, 16, 8, 0, 8),
    "one key": (2, 1, 1, 1, 5, 3, 1, 2),
    "a rope key wider than the latent": (2, 2, 40, 2, 24, 8, 80, 8),
}


def run(arguments, case, scale, tiles=TILES):
    mask, causal_offset = case
    bundle = LatentAttention(*to_device([*arguments, mask]), causal_offset, scale)
    result = latent_attention_triton(bundle, machine(), tiles)
    return [t.cpu() for t in result]


def assert_right(arguments, case, scale):
    o, lse = run(arguments, case, scale)
    exact = latent_attention_reference(*double(*arguments), *case, scale)
    measure = latent_attention_reference(*arguments, *case, scale)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])
    assert o.is_contiguous()


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_float32(sizes, mask):
    x = make_inputs(sizes)
    assert_right(x.absorbed, case_of(sizes, mask), x.scale)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", ["none", "causal", "right padding", "bias", "bias of finfo.min"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, mask):
    sizes = (2, 3, 50, 4, 40, 8, 8, 8)
    x = make_inputs(sizes, dtype)
    assert_right(x.absorbed, case_of(sizes, mask, dtype), x.scale)


def test_rows_that_finite_numbers_hide_stay_uniform_over_several_parts():
    x = make_inputs((1, 1, 150, 2, 24, 8, 8, 8))
    mask = torch.full((1, 1, 1, 150), torch.finfo(torch.float32).min)
    o, _ = run(x.absorbed, (mask, None), x.scale)
    mean = x.latent.mean(1).expand(1, 1, 2, -1)
    assert (o - mean).abs().max() < 150 * torch.finfo(torch.float32).eps * x.latent.abs().max()


def test_any_strides():
    x = make_inputs((2, 3, 40, 4, 24, 8, 8, 8))
    q_latent, q_rope, latent, k_rope = x.absorbed
    arguments = (
        q_latent.transpose(1, 3).contiguous().transpose(1, 3),
        q_rope.transpose(1, 2).contiguous().transpose(1, 2),
        latent.transpose(0, 1).contiguous().transpose(0, 1),
        k_rope[:, :1].expand(-1, 40, -1),
    )
    bias = torch.randn(1, 40, 3, 4).transpose(1, 3)
    for case in ((None, 37), (bias, None), (bias[..., :1] < 0, 37)):
        assert_right(arguments, case, x.scale)


@pytest.mark.parametrize("queries", [1, 4])
def test_keys_that_no_query_sees_may_hold_nan(queries):
    x = make_inputs((2, queries, 90, 4, 24, 8, 8, 8))
    written = torch.arange(90) % 7 != 3
    mask = (written & (torch.rand(2, 1, queries, 90) < 0.7)) | (torch.arange(90) == 0)
    unseen = ~mask.any(2)[:, 0]
    arguments = x.absorbed
    expected = run(arguments, (mask, None), x.scale)
    for t in arguments[2:]:
        t[unseen] = torch.nan
    for actual, wanted in zip(run(arguments, (mask, None), x.scale), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_nan_behind_the_causal_limit():
    x = make_inputs((1, 2, 40, 2, 24, 8, 8, 8))
    arguments = x.absorbed
    expected = run(arguments, (None, 20), x.scale)
    for t in arguments[2:]:
        t[:, 22:] = torch.nan
    for actual, wanted in zip(run(arguments, (None, 20), x.scale), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_no_keys_and_no_queries():
    x = make_inputs((2, 3, 0, 4, 24, 8, 8, 8))
    o, lse = run(x.absorbed, (None, None), x.scale)
    assert torch.equal(o, torch.zeros_like(o))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    x = make_inputs((2, 0, 3, 4, 24, 8, 8, 8))
    assert run(x.absorbed, (None, None), x.scale)[0].shape == (2, 0, 4, 24)
