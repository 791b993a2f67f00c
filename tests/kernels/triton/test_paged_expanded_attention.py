"""The Triton kernels of mla::paged_expanded_attention, against the reference in float64, as the op is on CPU."""

import dataclasses

import pytest
import torch

from mla_compile.kernels._common.plans import Plans
from mla_compile.kernels._common.tiles import Tiles
from mla_compile.kernels.expanded_attention import triton as launcher
from mla_compile.kernels.paged_expanded_attention.arguments import PagedExpandedAttention
from mla_compile.kernels.paged_expanded_attention.triton import paged_expanded_attention_triton

from ..paged import CODED, FP8, make_paged_heads
from ..test_paged_expanded_attention import COUNTS, assert_right, masks
from .where import ON_GPU, machine, to_device

pytestmark = [*ON_GPU]

TILES = Tiles(rows=16, keys=16, warps=4, stages=2)
SMALL = (40, 2, 16, 8, 4, 8)
"""Sq, N, L, P, R, V"""

# lengths, (Sq, N, L, P, R, V), page_size; workspace_tokens
SIZES = {
    "prefill in chunks": (([33, 40, 3], (36, 1, 16, 8, 4, 8), 16), 20),
    "one chunk": (([20, 5], (5, 3, 11, 7, 5, 9), 8), 64),
    "several short sequences": (([6, 4, 5, 1], (4, 2, 8, 5, 2, 3), 2), 30),
    "pages of one token": (([9, 1, 20], (4, 2, 16, 8, 4, 8), 1), 12),
    "a page of many": (([40], (3, 2, 12, 8, 4, 8), 128), 48),
    "no rope": (([20, 21], (20, 1, 16, 8, 0, 12), 64), 40),
    "keys that heads share": (([33, 7], (9, 2, 11, 0, 24, 9), 16), 20),
    "one key": (([1], (1, 1, 5, 3, 1, 2), 32), 8),
    "empty sequences": (([0, 12, 0], (3, 2, 33, 4, 4, 5), 4), 8),
    "full last pages": (([32, 16, 48], (5, 1, 20, 8, 6, 8), 16), 16),
    "fewer keys than queries": (([2, 1, 6], (4, 2, 8, 4, 4, 4), 4), 5),
    "widths of other models": (([20], (3, 1, 320, 192, 64, 256), 16), 16),
}


def run(*arguments, tiles=TILES, latent_scales=None, mask=None, first_positions=None, query_lens=None):
    more = to_device([latent_scales, mask, first_positions, query_lens])
    bundle = PagedExpandedAttention(*to_device(arguments[:7]), *arguments[7:], *more)
    result = paged_expanded_attention_triton(bundle, machine(), tiles)
    return [t.cpu() for t in result]


@pytest.mark.diagonal
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("case", "workspace_tokens"), SIZES.values(), ids=SIZES)
def test_float32(case, workspace_tokens, causal):
    assert_right(make_paged_heads(*case), causal, workspace_tokens, run)


@pytest.mark.parametrize("name", ["one chunk", "pages of one token"])
def test_a_latent_for_keys_and_one_for_values(name):
    case, workspace_tokens = SIZES[name]
    assert_right(make_paged_heads(*case).with_two_latents(5), True, workspace_tokens, run)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["prefill in chunks", "one chunk", "empty sequences"])
def test_half_precision(name, dtype):
    case, workspace_tokens = SIZES[name]
    assert_right(make_paged_heads(*case, dtype=dtype, index=torch.int64), True, workspace_tokens, run)


@pytest.mark.parametrize("page_size", [1, 16, 32, *(pytest.param(size, marks=pytest.mark.slow) for size in (64, 128))])
def test_page_sizes_around_that_of_a_workspace(page_size):
    assert_right(make_paged_heads([50, 17], (20, 1, 16, 8, 4, 8), page_size), True, 24, run)


@pytest.mark.diagonal
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_as_many_new_tokens_as_a_sequence_has(counts, causal):
    x = make_paged_heads([70, 64, 3], (70, 1, 8, 5, 2, 3), 16)
    x.q[torch.arange(70) >= torch.tensor(counts)[:, None]] = torch.nan  # padding may hold anything
    assert_right(x, causal, 32, run, query_lens=torch.tensor(counts))


@pytest.mark.diagonal
@pytest.mark.parametrize("starts", [[30, 9, -2], [0, 200, 2]], ids=str)
@pytest.mark.parametrize("counts", [None, [33, 40, 3]], ids=str)
def test_queries_that_are_not_the_last(starts, counts):
    counts = None if counts is None else torch.tensor(counts, dtype=torch.int32)
    x = make_paged_heads([37, 40, 3], SMALL, 16)
    assert_right(x, True, 20, run, first_positions=torch.tensor(starts), query_lens=counts)


SOON = ("of each head", "all or none", "a bias of finfo.min")
MASKS = [name if name in SOON else pytest.param(name, marks=pytest.mark.slow) for name in masks(1, 1, 1, 1)]
"""The others are slow: the kernel that reads masks is that of `expanded_attention`, which is tested with more."""


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    x = make_paged_heads([37, 40, 3], (18, *SMALL[1:]), 16)
    assert_right(x, True, 20, run, mask=masks(3, 2, 18, 41)[mask], query_lens=torch.tensor([18, 7, 0]))


@pytest.mark.diagonal
@pytest.mark.parametrize(("groups", "rope_too", "coded"), [*CODED, (3, False, FP8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_in_few_bits(dtype, groups, rope_too, coded):
    x = make_paged_heads([37, 0, 18], (9, 2, 48, 8, 8, 8), 16, dtype, groups=groups, rope_too=rope_too, coded=coded)
    assert_right(x, True, 20, run)


def test_any_strides():
    x = make_paged_heads([37, 40, 3], (18, *SMALL[1:]), 16)
    latent_pages, rope_pages, table, lengths = x.cache
    other = dataclasses.replace(
        x,
        q=x.q.transpose(1, 3).contiguous().transpose(1, 3),
        cache=(
            latent_pages.transpose(0, 1).contiguous().transpose(0, 1),
            rope_pages.contiguous(),
            table.t().contiguous().t(),
            lengths.repeat_interleave(2)[::2],
        ),
    )
    assert_right(other, True, 20, run)


def test_heads_in_groups(monkeypatch):
    monkeypatch.setattr(launcher, "_BYTES", 5000)
    monkeypatch.setattr(launcher, "PLANS", Plans())
    assert_right(make_paged_heads([37, 40, 3], (9, 5, 12, 8, 4, 8), 16), True, 16, run)


def test_the_tiles_of_the_table():
    x = make_paged_heads([150, 90], (70, 2, 24, 24, 8, 16), 16, torch.bfloat16)
    assert_right(x, True, 64, lambda *arguments, **more: run(*arguments, tiles=None, **more))
