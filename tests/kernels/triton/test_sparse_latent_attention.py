"""The Triton kernel of mla::sparse_latent_attention, against the reference in float64."""

import pytest
import torch

from mla_compile.kernels._common.tiles import Tiles
from mla_compile.kernels.sparse_latent_attention import sparse_latent_attention_reference
from mla_compile.kernels.sparse_latent_attention.arguments import SparseLatentAttention
from mla_compile.kernels.sparse_latent_attention.triton import sparse_latent_attention_triton

from ..errors import assert_as_close_as
from ..naive import MASKS, case_of
from ..test_sparse_latent_attention import SIZES, STEP, check_few_bits, make
from .where import ON_GPU, machine, to_device

pytestmark = [*ON_GPU]

TILES = Tiles(rows=16, keys=16, warps=4, stages=2)


def run(arguments, indices, case, scale, uniform=False):
    mask, causal_offset = case
    bundle = SparseLatentAttention(*to_device([*arguments, indices, mask]), causal_offset, scale, uniform)
    result = sparse_latent_attention_triton(bundle, machine(), TILES)
    return [t.cpu() for t in result]


def assert_right(arguments, indices, case, scale, uniform=False):
    o, lse = run(arguments, indices, case, scale, uniform)
    exact = sparse_latent_attention_reference(*(t.double() for t in arguments), indices, *case, scale, uniform)
    measure = sparse_latent_attention_reference(*arguments, indices, *case, scale, uniform)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])
    assert o.is_contiguous()


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["decode", "several tokens", "one key"])
def test_float32(name, mask):
    sizes, named = SIZES[name]
    arguments, indices, scale = make(sizes, named)
    assert_right(arguments, indices, case_of(sizes, mask), scale, uniform=mask != "none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    arguments, indices, scale = make(*SIZES["several tokens"], dtype)
    assert_right(arguments, indices.int(), (None, 50), scale)


def test_names_of_no_key_and_names_that_come_twice():
    arguments, indices, scale = make(*SIZES["decode"])
    indices[:, :, ::3] = -1
    indices[:, :, 1] = 300
    indices[:, :, 2] = indices[:, :, 4]
    assert_right(arguments, indices, (None, None), scale)
    indices[1] = -1
    assert_right(arguments, indices, (None, None), scale)


def test_keys_that_are_not_named_may_hold_nan():
    arguments, indices, scale = make(*SIZES["several tokens"])
    indices[:, :, -2:] = -1
    expected = run(arguments, indices, (None, None), scale)
    for b in range(2):
        unnamed = torch.ones(60, dtype=torch.bool)
        unnamed[indices[b][indices[b] >= 0]] = False
        for t in arguments[2:]:
            t[b, unnamed] = torch.nan
    for actual, wanted in zip(run(arguments, indices, (None, None), scale), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.diagonal
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("kind", STEP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_bits(dtype, kind, uniform):
    def run(*arguments):
        *tensors, causal_offset, scale, uniform, scales = arguments
        bundle = SparseLatentAttention(*to_device(tensors), causal_offset, scale, uniform, *to_device([scales]))
        result = sparse_latent_attention_triton(bundle, machine(), TILES)
        return [t.cpu() for t in result]

    check_few_bits(run, dtype, kind, uniform)


def test_any_strides_of_indices():
    arguments, indices, scale = make(*SIZES["several tokens"])
    assert_right(arguments, indices.transpose(1, 2).contiguous().transpose(1, 2), (None, None), scale)
