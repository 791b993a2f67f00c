"""Latents in FP8 or INT8 that are loaded two codes at a time, in one kernel with all others."""

import dataclasses
import math
from unittest import mock

import pytest
import torch

from mla_compile.kernels._common import launch
from mla_compile.kernels._common.tiles import Tiles
from mla_compile.kernels.paged_latent_attention import paged_latent_attention_reference
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention
from mla_compile.kernels.paged_latent_attention.triton import paged_latent_attention_triton
from mla_compile.kernels.sparse_latent_attention import sparse_latent_attention_reference
from mla_compile.kernels.sparse_latent_attention.arguments import SparseLatentAttention
from mla_compile.kernels.sparse_latent_attention.triton import sparse_latent_attention_triton

from ..errors import FACTOR, assert_as_close_as
from ..paged import FP8, INT8, make_paged, quantised
from .where import INTERPRETED, ON_GPU, machine, to_device

pytestmark = [*ON_GPU]

EPS = torch.finfo(torch.float32).eps
FEW, MANY = Tiles(16, 16, 4, 2), Tiles(32, 32, 8, 2)
CODED = {
    "groups": (4, False, FP8, 128),
    "one group": (1, False, FP8, 64),
    "one scale": (1, True, FP8, 32),
    "int8": (1, False, INT8, 64),
    "one scale, int8": (1, True, INT8, 32),
}
"""How many scales a token has, whether rope keys are coded too, the dtype, and the rank."""


@pytest.fixture(autouse=True)
def groups_in_words():
    """The number of groups that each launch takes as words."""
    taken = []

    def noted(*arguments):
        taken.append(groups_of(*arguments))
        return taken[-1]

    groups_of = launch._groups_in_words
    launch.PLANS.__init__()
    with mock.patch.object(launch, "_groups_in_words", noted):
        yield taken


def run(arguments, scale, scales, causal=True, split_tokens=None, tiles=FEW, mask=None, on=None):
    scales, mask = to_device([scales, mask])
    bundle = PagedLatentAttention(*to_device(arguments), causal, scale, scales, split_tokens, mask, None)
    return [t.cpu() for t in paged_latent_attention_triton(bundle, on or machine(), tiles)]


def assert_right(arguments, scale, scales, in_dtype=torch.float32, mask=None, causal=True, **how):
    """Compare with the equation in float32, of which the result is rounded: codes lose nothing on their way."""
    dtype = arguments[0].dtype
    o, lse = run(arguments, scale, scales, causal, mask=mask, **how)
    measure, exact = (
        paged_latent_attention_reference(
            *[t.to(wanted) if t.dtype == dtype else t for t in arguments], causal, scale, scales, mask=mask
        )
        for wanted in (in_dtype, torch.float64)
    )
    assert_as_close(measure, (o, lse), exact, scales)


def assert_as_close(measure, actual, exact, scales):
    assert_as_close_as(measure[0].to(actual[0].dtype), actual[0], exact[0])
    # The logarithm of a scale is added to scores, and taken from the result.
    logarithms = [numbers[numbers.isfinite()].abs().max() for numbers in (exact[1], scales.abs().log())]
    largest = logarithms[0] + logarithms[1] + math.log(2**14)
    allowed = FACTOR * torch.maximum((measure[1] - exact[1]).nan_to_num().abs().max(), EPS / 2 * largest)
    assert torch.equal(actual[1].isfinite(), exact[1].isfinite())
    assert (actual[1] - exact[1]).nan_to_num().abs().max() <= allowed


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tiles", [FEW, MANY], ids=["few", "many"])
def test_each_kind(kind, dtype, tiles, groups_in_words):
    groups, rope_too, coded, rank = CODED[kind]
    x = make_paged([37, 0, 18], (2, 9, rank, 8), 16, dtype)
    in_dtype = dtype if rope_too else torch.float32  # rope keys are multiplied with their scale first
    assert_right(*_quantised(x, groups, rope_too, coded), in_dtype, tiles=tiles)
    assert groups_in_words == [groups]


def _quantised(x, *how):
    arguments, scales = quantised(x, *how)
    return arguments, x.scale, scales


@pytest.mark.parametrize("how", [{"split_tokens": 32}, {"causal": False}, {"tiles": MANY, "split_tokens": 32}], ids=str)
def test_in_parts_and_without_order(how):
    assert_right(*_quantised(make_paged([70, 5], (2, 3, 64, 8), 4, torch.bfloat16), 2), **how)


def test_keys_that_are_shared_out_over_programs():
    assert_right(*_quantised(make_paged([300, 1, 90], (1, 16, 64, 8), 16, torch.bfloat16), 2))


@pytest.mark.parametrize("by_row", [False, True])
def test_a_mask(by_row, groups_in_words):
    x = make_paged([37, 20], (2, 3, 64, 8), 16, torch.bfloat16)
    mask = torch.rand(2, 3 if by_row else 1, 2 if by_row else 1, 48) < 0.7
    assert_right(*_quantised(x, 2), mask=mask)
    assert groups_in_words == [2]


def test_named_keys(groups_in_words):
    torch.manual_seed(0)
    q, rope = torch.randn(2, 3, 20, 64, dtype=torch.bfloat16), torch.randn(2, 3, 20, 8, dtype=torch.bfloat16)
    k_rope, scales = torch.randn(2, 40, 8, dtype=torch.bfloat16), torch.rand(2, 40, 2)
    codes = (torch.randn(2, 40, 64) * 100).to(FP8)
    indices = torch.stack([torch.randperm(40)[:24] for _ in range(6)]).view(2, 3, 24)
    indices[0, 1, 5:] = -1
    indices[1, 2] = -1
    tensors = to_device([q, rope, codes, k_rope, indices, scales])
    bundle = SparseLatentAttention(*tensors[:5], None, None, 0.1, False, tensors[5])
    actual = [t.cpu() for t in sparse_latent_attention_triton(bundle, machine(), MANY)]
    measure, exact = (
        sparse_latent_attention_reference(
            *(q.to(wanted), rope.to(wanted), codes, k_rope.to(wanted), indices), None, None, 0.1, False, scales
        )
        for wanted in (torch.float32, torch.float64)
    )
    assert_as_close(measure, actual, exact, scales)
    assert groups_in_words == [2]


@pytest.mark.parametrize("magnitude", [2.0**-30, 2.0**30])
def test_any_magnitude_of_queries_and_latents(magnitude):
    """Float16 alone would hold neither."""
    x = make_paged([37, 18], (1, 5, 64, 8), 16, torch.bfloat16)
    (q, rope, codes, *rest), scale, scales = _quantised(x, 2)
    assert_right((q / magnitude, rope, codes, *rest), scale, scales * magnitude)


def test_scales_that_differ_from_token_to_token():
    """Up to a million times, as in tokens to which all others attend; the reference's own weights lose as much."""
    x = make_paged([40], (1, 5, 64, 8), 16, torch.bfloat16)
    (q, *rest), scale, scales = _quantised(x, 2)
    apart = torch.exp2(torch.randint(-20, 1, scales.shape[:2]))[..., None]
    assert_right((q, *rest), scale, scales * apart)


def test_latents_of_zeros():
    x = make_paged([40], (1, 5, 64, 8), 16, torch.bfloat16)
    (q, rope, codes, *rest), scale, scales = _quantised(x, 2)
    for scales_of_zeros in (torch.zeros_like(scales), scales):
        o, lse = run((q, rope, torch.zeros_like(codes), *rest), scale, scales_of_zeros)
        of_zeros = [t.double() if t.dtype == q.dtype else t for t in (q, rope, torch.zeros_like(codes), *rest)]
        _, exact = paged_latent_attention_reference(*of_zeros, True, scale, scales)
        assert not o.any()
        assert (lse - exact).abs().max() <= FACTOR * EPS * 60


@pytest.mark.parametrize(("coded", "arch"), [(FP8, "sm_90"), (FP8, "sm_80"), (INT8, "sm_90")], ids=str)
def test_every_code(coded, arch):
    """Attention to a single key gives its latent; before sm_89, hardware has no conversion of FP8."""
    if (coded, arch) == (FP8, "sm_90") and not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("hardware has no conversion")
    codes = torch.arange(256, dtype=torch.uint8).view(coded)
    numbers = codes.to(torch.bfloat16)
    some = codes.where(~numbers.isnan(), codes[0])
    assert torch.equal(only_key(some, arch)[0], some.to(torch.bfloat16))
    if coded == FP8:
        assert all(result.isnan().all() for result in only_key(codes, arch))  # in the score, and so in all


def only_key(codes, arch):
    q, rope = torch.zeros(1, 1, 1, 256, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 0, dtype=torch.bfloat16)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    results = run(
        (q, rope, codes.view(1, 1, 256), rope[0], table, lengths),
        1.0,
        torch.ones(1, 1, 1),
        on=dataclasses.replace(machine(), arch=arch),
    )
    return [result.flatten() for result in results]


def test_codes_that_begin_at_an_odd_address_after_others_that_did_not(groups_in_words):
    """What was planned for the same layout does not hold for them."""
    x = make_paged([37, 18], (1, 5, 64, 8), 16, torch.bfloat16)
    (q, rope, codes, *rest), scale, scales = _quantised(x, 2)
    rows = torch.zeros(*codes.shape[:2], 66, dtype=FP8)
    for start, groups in ((0, 2), (1, 0)):
        own = rows[..., start : start + 64].copy_(codes)
        assert_right((q, rope, own, *rest), scale, scales, torch.float32 if groups else q.dtype)
        assert groups_in_words[-1] == groups


def test_what_is_not_taken_as_words(groups_in_words):
    x = make_paged([37, 18], (1, 5, 64, 8), 16, torch.bfloat16)
    (q, rope, codes, *rest), scale, scales = _quantised(x, 2)
    assert_right((q, rope, codes, *rest), scale, scales, q.dtype, mask=torch.zeros(1, 1, 1, 48, dtype=q.dtype))
    behind = torch.zeros(*codes.shape[:2], 65, dtype=FP8)[..., 1:].copy_(codes)  # odd strides
    run((q, rope, behind, *rest), scale, scales)
    run((q, rope, codes, *rest), scale, scales, tiles=Tiles(64, 16, 8, 2))
    run((q.float(), rope.float(), codes, rest[0].float(), *rest[1:]), scale, scales)
    assert groups_in_words == [0] * 4


def test_scales_below_0():
    x = make_paged([40, 3], (1, 5, 64, 8), 16, torch.bfloat16)
    arguments, scale, scales = _quantised(x, 2)
    assert_right(arguments, scale, -scales)
