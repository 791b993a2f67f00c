"""The Triton kernel of mla::paged_latent_attention, against the reference in float64."""

import dataclasses

import pytest
import torch

from mla_compile.kernels._common.tiles import Tiles
from mla_compile.kernels.paged_latent_attention import paged_latent_attention_reference
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention
from mla_compile.kernels.paged_latent_attention.triton import paged_latent_attention_triton

from ..errors import assert_as_close_as
from ..paged import CODED, FP8, make_paged, quantised
from .where import ON_GPU, machine, to_device

pytestmark = [*ON_GPU]

TILES = Tiles(rows=16, keys=16, warps=4, stages=2)

# lengths, (Sq, N, L, R), page_size
SIZES = {
    "decode, side by side": ([37, 16, 3], (1, 4, 24, 8), 16),
    "two tiles of rows": ([33, 5], (3, 6, 40, 7), 32),
    "pages of one token": ([9, 1, 20], (2, 2, 16, 4), 1),
    "pages of three": ([19], (1, 3, 16, 2), 3),
    "no rope": ([40, 41], (1, 2, 16, 0), 64),
    "one block of columns": ([17], (1, 1, 13, 3), 8),
    "one key": ([1], (1, 1, 5, 1), 128),
    "empty sequences": ([0, 12, 0], (2, 3, 33, 4), 4),
    "full last pages": ([32, 16, 48], (1, 5, 20, 6), 16),
    "fewer keys than queries": ([2, 1, 6], (4, 2, 8, 4), 4),
    "sixteen queries": ([40], (16, 2, 16, 4), 16),
}
HALF = [
    pytest.param(case, id=name, marks=[pytest.mark.slow] if name in list(SIZES)[2::2] else [])
    for name, case in SIZES.items()
]
"""For half precision, every other case from the third on is slow, since addresses do not depend on the dtype."""


def run(arguments, causal, scale, scales=None, split_tokens=None, tiles=TILES, mask=None, first=None):
    mask, first, scales = to_device([mask, first, scales])
    bundle = PagedLatentAttention(*to_device(arguments), causal, scale, scales, split_tokens, mask, first)
    result = paged_latent_attention_triton(bundle, machine(), tiles)
    return [t.cpu() for t in result]


def assert_right(x, causal, split_tokens=None, tiles=TILES):
    o, lse = run(x.arguments, causal, x.scale, None, split_tokens, tiles)
    exact = paged_latent_attention_reference(*x.double().arguments, causal, x.scale)
    measure = paged_latent_attention_reference(*x.arguments, causal, x.scale)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])
    assert o.is_contiguous()


@pytest.mark.diagonal
@pytest.mark.parametrize("split_tokens", [None, 16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", SIZES.values(), ids=SIZES)
def test_float32(case, causal, split_tokens):
    assert_right(make_paged(*case), causal, split_tokens)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", HALF)
def test_half_precision(case, dtype):
    assert_right(make_paged(*case, dtype=dtype, index=torch.int64), True)


@pytest.mark.parametrize("page_size", [37, 41, 64])
def test_a_page_each_of_any_size(page_size):
    """A dense cache is passed as one page per sequence."""
    assert_right(make_paged([37, 0, 5], (2, 4, 24, 8), page_size, spare_pages=0), True)


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
def test_page_sizes_of_several_tiles_and_of_less_than_one(page_size):
    x = make_paged([150, 3], (1, 2, 16, 4), page_size, torch.bfloat16)
    assert_right(x, True, tiles=dataclasses.replace(TILES, keys=32))


SHARED = {
    "one long among short": ([900, 5, 0, 17, 64, 1], (1, 4, 24, 8)),
    "more sequences than programs": ([70, 0, 250, 16, 33, 1, 90, 48, 120, 7, 64, 200], (2, 2, 16, 4)),
    "more tiles of rows than processors": ([200, 30], (9, 16, 16, 4)),
    "whole ones": ([130, 140, 0], (1, 3, 16, 4)),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SHARED.values(), ids=SHARED)
def test_keys_that_are_shared_out(case, dtype):
    assert_right(make_paged(*case, 16, dtype), True)


def test_shared_keys_of_queries_that_are_not_the_last():
    x = make_paged([400, 16, 60, 0], (3, 4, 24, 8), 16)
    assert_right_with(x, True, first=torch.tensor([200, 9, 57, 0]))


def test_shared_keys_in_fp8_give_the_same_numbers_each_time():
    x = make_paged([300, 7, 90], (2, 3, 48, 8), 16, torch.bfloat16)
    arguments, scales = quantised(x, 1)
    first, second = (run(arguments, True, x.scale, scales) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    exact_arguments = [t.double() if t.dtype == torch.bfloat16 else t for t in arguments]
    exact = paged_latent_attention_reference(*exact_arguments, True, x.scale, scales)
    measure = paged_latent_attention_reference(*arguments, True, x.scale, scales)
    assert_as_close_as(measure[0], first[0], exact[0])
    assert_as_close_as(measure[1].float(), first[1], exact[1])


def assert_right_with(x, causal, **more):
    o, lse = run(x.arguments, causal, x.scale, **more)
    named = {"mask": more.get("mask"), "first_positions": more.get("first")}
    exact = paged_latent_attention_reference(*x.double().arguments, causal, x.scale, **named)
    measure = paged_latent_attention_reference(*x.arguments, causal, x.scale, **named)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])


@pytest.mark.parametrize("starts", [[30, 9, -2], [0, 200, 2]])
def test_queries_that_are_not_the_last(starts):
    x = make_paged([70, 16, 3], (3, 4, 24, 8), 16)
    assert_right_with(x, True, first=torch.tensor(starts))


def test_keys_behind_the_last_query_may_hold_nan():
    x = make_paged([70, 16, 3], (3, 4, 24, 8), 16)
    first = torch.tensor([30, 9, -2])
    expected = run(x.arguments, True, x.scale, first=first)
    for b, start in enumerate(first.tolist()):
        for j in range(start + 3, int(x.seq_lens[b])):
            x.pool[x.block_table[b, j // 16], j % 16] = torch.nan
    for actual, wanted in zip(run(x.arguments, True, x.scale, first=first), expected, strict=True):
        assert torch.equal(actual, wanted)


MASKS = {
    "some keys": lambda: torch.rand(3, 1, 1, 80) < 0.6,
    "one sequence's": lambda: torch.rand(1, 1, 3, 80) < 0.6,
    "of each head": lambda: torch.rand(3, 4, 3, 80) < 0.6,
    "all or none": lambda: torch.tensor([True, False, True])[:, None, None, None],
    "a bias": lambda: torch.randn(3, 1, 3, 80),
    "a bias of finfo.min": lambda: torch.where(torch.rand(3, 1, 3, 80) < 0.6, 0.0, torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks(mask):
    assert_right_with(make_paged([70, 16, 3], (3, 4, 24, 8), 16), True, mask=mask())


@pytest.mark.parametrize("rank", [192, 320])
def test_ranks_that_are_no_power_of_two(rank):
    assert_right(make_paged([20], (1, 3, rank, 64), 16), True)


def test_any_strides_of_queries_and_pages():
    x = make_paged([37, 16, 3], (2, 4, 24, 8), 16)
    q_latent, q_rope, latent_pages, rope_pages, table, lengths = x.arguments
    arguments = (
        q_latent.transpose(1, 3).contiguous().transpose(1, 3),
        q_rope.transpose(1, 2).contiguous().transpose(1, 2),
        latent_pages.transpose(0, 1).contiguous().transpose(0, 1),
        rope_pages.contiguous(),
        table.t().contiguous().t(),
        lengths.repeat_interleave(2)[::2].contiguous(),
    )
    for actual, wanted in zip(run(arguments, True, x.scale), run(x.arguments, True, x.scale), strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.diagonal
@pytest.mark.parametrize(("groups", "rope_too", "coded"), [*CODED, (3, False, FP8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_in_few_bits(dtype, groups, rope_too, coded):
    x = make_paged([37, 0, 18], (2, 3, 48, 8), 16, dtype)
    arguments, scales = quantised(x, groups, rope_too, coded)
    o, lse = run(arguments, True, x.scale, scales)
    exact_arguments = [t.double() if t.dtype == dtype else t for t in arguments]
    exact = paged_latent_attention_reference(*exact_arguments, True, x.scale, scales)
    measure = paged_latent_attention_reference(*arguments, True, x.scale, scales)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])


@pytest.mark.parametrize("in_hardware", [False, True])
def test_every_fp8_number(in_hardware):
    """Attention to a single key gives its latent."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    latent = numbers.where(~numbers.float().isnan(), numbers[0]).view(1, 1, 256)
    assert torch.equal(only_key(latent, in_hardware), latent.float())


def test_every_int8_number():
    latent = torch.arange(-128, 128).to(torch.int8).view(1, 1, 256)
    assert torch.equal(only_key(latent, in_hardware=False), latent.float())


def test_an_fp8_nan_is_nan():
    for bits in (0x7F, 0xFF):
        latent = torch.full((1, 1, 16), bits, dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert only_key(latent, in_hardware=False).isnan().all()


def only_key(latent, in_hardware):
    """Attention to one coded latent `[1, 1, L]`; before sm_89, hardware has no conversion of FP8."""
    rank = latent.shape[2]
    q, rope = torch.zeros(1, 1, 1, rank), torch.zeros(1, 1, 1, 0)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    arguments = to_device([q, rope, latent, rope[0], table, lengths])
    on = machine() if in_hardware else dataclasses.replace(machine(), arch="sm_80")
    bundle = PagedLatentAttention(*arguments, True, 1.0, *to_device([torch.ones(1, 1, 1)]))
    o, _ = paged_latent_attention_triton(bundle, on, TILES)
    return o.cpu()[0]


@pytest.mark.parametrize("fp8", [False, True])
def test_with_fixed_parts_the_result_of_a_sequence_does_not_depend_on_the_batch(fp8):
    x = make_paged([40, 32, 3], (2, 4, 24, 8), 16)
    arguments, scales = quantised(x, 1) if fp8 else (x.arguments, None)
    o, lse = run(arguments, True, x.scale, scales, 32)
    again = run(arguments, True, x.scale, scales, 32)
    assert torch.equal(o, again[0])
    q_latent, q_rope, latent_pages, rope_pages, table, lengths = arguments
    for b in range(3):
        this = slice(b, b + 1)
        alone = q_latent[this], q_rope[this], latent_pages, rope_pages, table[this], lengths[this]
        alone_o, alone_lse = run(alone, True, x.scale, scales, 32)
        assert torch.equal(alone_o, o[this])
        assert torch.equal(alone_lse, lse[this])


def test_the_tiles_of_the_table():
    assert_right(make_paged([200], (2, 16, 24, 8), 64, torch.bfloat16), True, tiles=None)
