"""The Triton kernel of mla::expanded_attention, against float64; naive MLA is the measure of error."""

import dataclasses

import pytest
import torch

from mla_compile.kernels._common.plans import Plans
from mla_compile.kernels._common.tiles import Tiles, blocks
from mla_compile.kernels.expanded_attention import expanded_attention_reference
from mla_compile.kernels.expanded_attention import triton as launcher
from mla_compile.kernels.expanded_attention.arguments import ExpandedAttention
from mla_compile.kernels.expanded_attention.triton import expanded_attention_triton

from ..errors import assert_as_close_as
from ..naive import case_of, make_inputs, masks, naive_mla
from .where import ON_GPU, machine, to_device

pytestmark = [*ON_GPU]

TILES = Tiles(rows=16, keys=16, warps=4, stages=2)
SOON = ("left padding and causal", "bool of each head and query", "some rows hidden", "one value for all keys")
SOON += ("all hidden", "bias and causal", "bias of finfo.min")
MASKS = [name if name in SOON else pytest.param(name, marks=pytest.mark.slow) for name in masks(1, 1, 1, 1)]

# B, Sq, T, N, L, P, R, V; workspace_tokens
SIZES = {
    "one chunk": ((2, 5, 30, 2, 16, 16, 8, 16), 64),
    "prefill in chunks": ((1, 36, 36, 1, 12, 24, 8, 20), 20),
    "prefill after a context": ((2, 10, 38, 2, 11, 7, 5, 9), 20),
    "one key": ((2, 1, 1, 1, 5, 3, 1, 2), 8),
    "a key at a time": ((1, 3, 5, 1, 8, 5, 2, 3), 1),
    "several short sequences": ((5, 4, 6, 2, 8, 5, 2, 3), 13),
    "keys that heads share": ((2, 10, 38, 2, 11, 0, 24, 9), 20),
}


def run(x, case, workspace_tokens, tiles=TILES, on=None):
    (mask,) = to_device(case[:1])
    arguments = to_device(x.tensors)
    bundle = ExpandedAttention(*arguments, mask, case[1], x.scale, workspace_tokens)
    result = expanded_attention_triton(bundle, on or machine(), tiles)
    return [t.cpu() for t in result]


def assert_right(x, case, workspace_tokens, tiles=TILES, on=None):
    o, lse = run(x, case, workspace_tokens, tiles, on)
    exact, exact_lse = expanded_attention_reference(
        *x.map(torch.Tensor.double).tensors, *case, x.scale, workspace_tokens
    )
    eager, eager_lse = naive_mla(x, case)
    assert_as_close_as(eager, o, exact)
    assert_as_close_as(eager_lse.float(), lse, exact_lse)
    assert o.is_contiguous()


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", ["none", "causal", "causal, first queries see nothing", "causal, last keys unseen"])
@pytest.mark.parametrize(("sizes", "workspace_tokens"), SIZES.values(), ids=SIZES)
def test_causal_limits(sizes, workspace_tokens, mask):
    assert_right(make_inputs(sizes), case_of(sizes, mask), workspace_tokens)


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    sizes, workspace_tokens = SIZES["prefill after a context"]
    assert_right(make_inputs(sizes), case_of(sizes, mask), workspace_tokens)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["causal", "right padding", "bias of finfo.min"])
def test_half_precision(mask, dtype):
    sizes = (2, 9, 60, 2, 40, 24, 8, 16)
    assert_right(make_inputs(sizes, dtype), case_of(sizes, mask, dtype), 32)


@pytest.mark.diagonal
@pytest.mark.parametrize("nope", [16, 48, 80, 192])
@pytest.mark.parametrize(("rope", "columns"), [(0, 40), (16, 96)])
def test_widths_that_are_no_power_of_two(nope, rope, columns):
    assert_right(make_inputs((1, 3, 20, 1, 8, nope, rope, columns)), (None, 17), 16)


def test_blocks_of_columns():
    widths = {1: (16, 0), 16: (16, 0), 17: (32, 0), 80: (64, 16), 96: (64, 32), 100: (128, 0), 128: (128, 0)}
    widths |= {192: (128, 64), 320: (256, 64)}
    assert {width: blocks(width) for width in widths} == widths


def test_no_keys():
    x = make_inputs((2, 3, 0, 2, 8, 4, 2, 5))
    o, lse = run(x, (None, None), 16)
    assert torch.equal(o, torch.zeros(2, 3, 2, 5))
    assert torch.equal(lse, torch.full((2, 3, 2), -torch.inf))


def test_rows_that_finite_numbers_hide_stay_uniform_over_chunks():
    x = make_inputs((1, 2, 50, 2, 24, 8, 8, 8))
    mask = torch.full((1, 1, 1, 50), torch.finfo(torch.float32).min)
    o, _ = run(x, (mask, None), 16)
    mean = (x.latent[:, None] @ x.w_uv.mT).mean(2)[:, None]
    assert (o - mean).abs().max() < 50 * torch.finfo(torch.float32).eps * x.latent.abs().max()


def test_any_strides():
    x = make_inputs((2, 7, 30, 2, 12, 8, 4, 8))
    other = dataclasses.replace(
        x,
        q=x.q.transpose(1, 3).contiguous().transpose(1, 3),
        latent=x.latent.transpose(0, 1).contiguous().transpose(0, 1),
        k_rope=x.k_rope.contiguous(),
    )
    assert_right(other, (None, 23), 16)
    own = other.with_own_ropes()
    own = dataclasses.replace(own, k_rope=own.k_rope.transpose(1, 3).contiguous().transpose(1, 3))
    assert_right(own, (None, 23), 16)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", ["causal", "left padding and causal", "bool of each head and query"])
@pytest.mark.parametrize(("sizes", "workspace_tokens"), SIZES.values(), ids=SIZES)
def test_rope_keys_of_each_head(sizes, workspace_tokens, mask):
    assert_right(make_inputs(sizes).with_own_ropes(), case_of(sizes, mask), workspace_tokens)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", ["causal", "left padding and causal", "bool of each head and query"])
@pytest.mark.parametrize(("sizes", "workspace_tokens"), SIZES.values(), ids=SIZES)
def test_a_latent_for_keys_and_one_for_values(sizes, workspace_tokens, mask):
    assert_right(make_inputs(sizes).with_two_latents(sizes[4] // 3), case_of(sizes, mask), workspace_tokens)


def test_heads_in_groups(monkeypatch):
    monkeypatch.setattr(launcher, "_BYTES", 5000)
    monkeypatch.setattr(launcher, "PLANS", Plans())
    x = make_inputs((2, 9, 40, 5, 12, 8, 4, 8))
    for inputs in (x, x.with_own_ropes()):
        assert_right(inputs, masks(2, 5, 9, 40)["bool of each head and query"], 16)


def test_the_tiles_of_the_table():
    assert_right(make_inputs((1, 70, 150, 2, 24, 24, 8, 16), torch.bfloat16), (None, 80), 64, tiles=None)


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param("none", marks=pytest.mark.slow),
        pytest.param("causal", marks=pytest.mark.slow),
        pytest.param("left padding and causal", marks=pytest.mark.slow),
        "bool of each head and query",
    ],
)
def test_heads_come_first_where_they_keep_the_device_busy(mask, monkeypatch):
    """With five tiles of queries per head, on one processor, a head sees all its keys at once, and needs no state."""
    x, launch, launched = make_inputs((2, 70, 80, 3, 12, 8, 4, 8)), launcher._launch, []

    def note(operands, *arguments):
        *_, state, chunk, _, _, first_last, _, _ = arguments
        launched.append((chunk.start, chunk.stop, operands[0].shape[2], first_last, state[0].numel()))
        launch(operands, *arguments)

    monkeypatch.setattr(launcher, "_launch", note)
    monkeypatch.setattr(launcher, "PROGRAMS", 1)
    monkeypatch.setattr(launcher, "PLANS", Plans())
    assert_right(x, masks(2, 3, 70, 80)[mask], 40, on=dataclasses.replace(machine(), processors=1))
    assert launched == [(0, 80, 1, (True, True), 0)] * 6
