"""The Triton kernels of the gradients of mla::expanded_attention, against float64; autograd of the equation is the
measure of error."""

import dataclasses

import pytest
import torch

from mla_compile.kernels._common.tiles import Tiles
from mla_compile.kernels.attended import Attended
from mla_compile.kernels.backward import triton as launcher
from mla_compile.kernels.backward.tiles import Pair
from mla_compile.kernels.backward.triton import attend_backward_triton
from mla_compile.kernels.expanded_attention import expanded_attention_aten

from ..errors import assert_as_close_as
from ..naive import MASKS, case_of, make_inputs
from ..test_expanded_attention_backward import directions, equation, gradients
from .where import ON_GPU, machine, to_device

pytestmark = [*ON_GPU]

TILES = Pair(Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1))
UNEQUAL = Pair(Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1))
SOON = ("none", "left padding and causal", "bool of each head and query", "bias and causal", "bias of finfo.min")

# B, Sq, T, N, L, P, R, V; workspace_tokens
SIZES = {
    "square": ((2, 23, 23, 2, 12, 6, 4, 6), 64),
    "after a context": ((2, 10, 38, 3, 11, 7, 5, 9), 20),
    "no rope": ((1, 9, 40, 2, 16, 24, 0, 40), 20),
    "one key": ((2, 1, 1, 1, 5, 3, 1, 2), 8),
    "keys that heads share": ((2, 10, 38, 2, 11, 0, 24, 9), 20),
}


def backward(x, case, direction, workspace_tokens, wanted=(True,) * 5, tiles=TILES):
    """The gradients of the operands, each on the CPU, from what the forward gives in the dtype of its op."""
    o, lse = expanded_attention_aten(*x.tensors, *case, x.scale, workspace_tokens)
    d_lse = None if direction[1] is None else direction[1].float().masked_fill(lse == -torch.inf, 0)
    given = to_device([direction[0].to(o.dtype), d_lse, *x.tensors, case[0], o, lse])
    do, d_lse, *operands, mask, o, lse = given
    attended = Attended(do, d_lse, *operands, mask, case[1], x.scale, workspace_tokens, o, lse, wanted=[*wanted, False])
    return [t.cpu() for t in attend_backward_triton(attended, machine(), tiles)]


def assert_right(x, case, workspace_tokens, with_lse=False, tiles=TILES):
    direction = directions(x, with_lse)
    with torch.enable_grad():
        exact = gradients(equation, x.map(torch.Tensor.double), case, direction)
        measure = gradients(equation, x, case, direction)
    for plain, ours, truth in zip(
        measure, backward(x, case, direction, workspace_tokens, tiles=tiles), exact, strict=True
    ):
        if truth.numel():
            assert_as_close_as(plain, ours, truth, merges=32)  # as in the tests of the ATen operations


@pytest.mark.parametrize("mask", [m if m in SOON else pytest.param(m, marks=pytest.mark.slow) for m in MASKS])
def test_masks(mask):
    sizes, workspace_tokens = SIZES["after a context"]
    assert_right(make_inputs(sizes), case_of(sizes, mask), workspace_tokens)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", ["none", "causal", "causal, first queries see nothing", "causal, last keys unseen"])
@pytest.mark.parametrize(("sizes", "workspace_tokens"), SIZES.values(), ids=SIZES)
def test_causal_limits(sizes, workspace_tokens, mask):
    assert_right(make_inputs(sizes), case_of(sizes, mask), workspace_tokens, tiles=UNEQUAL)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", ["causal", "left padding and causal", "bias"])
@pytest.mark.parametrize("sizes", [SIZES["square"][0], SIZES["after a context"][0]], ids=["square", "after a context"])
def test_of_the_log_sum_exp(sizes, mask):
    assert_right(make_inputs(sizes), case_of(sizes, mask), 32, with_lse=True)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["causal", "right padding", "bias of finfo.min"])
def test_half_precision(mask, dtype):
    sizes = (2, 21, 36, 2, 40, 24, 8, 16)
    assert_right(make_inputs(sizes, dtype), case_of(sizes, mask, dtype), 32)


@pytest.mark.parametrize(("nope", "rope", "columns"), [(80, 16, 48), (48, 0, 96)])
def test_widths_that_are_no_power_of_two(nope, rope, columns):
    assert_right(make_inputs((1, 5, 20, 1, 8, nope, rope, columns)), (None, 15), 16)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", ["causal", "left padding and causal"])
@pytest.mark.parametrize("kind", ["rope keys of each head", "two latents"])
def test_other_keys(kind, mask):
    sizes, workspace_tokens = SIZES["after a context"]
    x = make_inputs(sizes)
    x = x.with_own_ropes() if kind == "rope keys of each head" else x.with_two_latents(sizes[4] // 3)
    assert_right(x, case_of(sizes, mask), workspace_tokens)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", ["bool of each head and query", "bias"])
@pytest.mark.parametrize(
    ("workspace_tokens", "groups"), [(12, [(1, 1)] * 9), (14, [(1, 2), (1, 1)] * 3), (50, [(2, 3), (1, 3)])]
)
def test_heads_and_sequences_in_groups(monkeypatch, mask, workspace_tokens, groups):
    """Of 3 sequences of 20 tokens and 3 heads: a head of one at a time, up to two heads, or all heads of two."""
    found, launch = [], launcher._to_queries

    def counted(x, *rest):
        found.append((x.q.shape[0], x.q.shape[2]))
        return launch(x, *rest)

    monkeypatch.setattr(launcher, "PROGRAMS", 0)
    monkeypatch.setattr(launcher, "_to_queries", counted)
    sizes = (3, 9, 20, 3, 12, 6, 4, 6)
    assert_right(make_inputs(sizes), case_of(sizes, mask), workspace_tokens)
    assert found == groups


def test_keys_that_no_query_sees_may_hold_nan_and_have_no_gradient():
    x = make_inputs((2, 6, 30, 2, 12, 6, 4, 6))
    hidden = (torch.arange(30) % 7 != 3) & (torch.rand(2, 1, 6, 30) < 0.7)
    direction = directions(x, with_lse=False)
    for mask, offset in ((hidden, None), (None, 20), (hidden, 20)):
        seen = torch.ones(2, 1, 6, 30, dtype=torch.bool) if mask is None else mask
        seen = seen if offset is None else seen & torch.ones(6, 30, dtype=torch.bool).tril(offset)
        unseen = ~seen.any(2)[:, 0]
        assert unseen.any()
        expected = backward(x, (mask, offset), direction, 16)
        other = x.map(torch.clone)
        other.latent[unseen], other.k_rope[unseen] = torch.nan, torch.nan
        for ours, wanted in zip(backward(other, (mask, offset), direction, 16), expected, strict=True):
            assert torch.equal(ours, wanted)
        assert not expected[1][unseen].any()
        assert not expected[2][unseen].any()


@pytest.mark.parametrize("wanted", [1, 2, 8, 16, 22])
def test_only_what_is_wanted_is_computed(wanted):
    x, flags = make_inputs((2, 5, 9, 2, 8, 4, 2, 4)), [bool(wanted >> i & 1) for i in range(5)]
    direction = directions(x, with_lse=False)
    every, some = (backward(x, (None, 4), direction, 8, asked) for asked in ([True] * 5, flags))
    for actual, expected in zip(some, [g for g, flag in zip(every, flags, strict=True) if flag], strict=True):
        assert torch.equal(actual, expected)


def test_any_strides():
    x = make_inputs((2, 7, 20, 2, 12, 8, 4, 8))
    other = dataclasses.replace(
        x,
        q=x.q.transpose(1, 3).contiguous().transpose(1, 3),
        latent=x.latent.transpose(0, 1).contiguous().transpose(0, 1),
        k_rope=x.k_rope.transpose(1, 2).contiguous().transpose(1, 2),
    )
    assert_right(other, (None, 13), 16)
    direction = torch.ones(1, dtype=torch.float64).expand(2, 7, 2, 8), None  # as that of a sum
    found = [backward(inputs, (None, 13), direction, 16) for inputs in (other, x)]
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("sizes", [(2, 3, 0, 2, 8, 4, 2, 5), (2, 0, 3, 2, 8, 4, 2, 5), (0, 3, 3, 2, 8, 4, 2, 5)])
def test_nothing_to_attend_to(sizes):
    x = make_inputs(sizes)
    found = backward(x, (None, None), directions(x, with_lse=False), 16)
    assert [t.shape for t in found] == [t.shape for t in x.tensors]
    assert not any(t.any() for t in found)
