"""mla::sparse_latent_attention against float64, for many sizes, masks, dtypes and kinds of indices."""

import pytest
import torch

from mla_compile import int4, int8
from mla_compile.errors import KernelError
from mla_compile.fp8 import RowLayout
from mla_compile.kernels.latent_attention import latent_attention_reference
from mla_compile.kernels.sparse_latent_attention import aten, native, sparse_latent_attention_reference

from .errors import assert_as_close_as, worse
from .naive import MASKS, case_of, make_inputs, masks

sparse_latent_attention = torch.ops.mla.sparse_latent_attention

# B, Sq, T, N, L, P, R, V and topk
SIZES = {
    "decode": ((2, 1, 300, 4, 24, 8, 8, 8), 40),
    "several tokens": ((2, 5, 60, 3, 33, 5, 7, 9), 16),
    "no rope": ((1, 4, 50, 2, 16, 8, 0, 8), 9),
    "one key": ((2, 1, 1, 1, 5, 3, 1, 2), 1),
    "every key": ((2, 6, 13, 4, 24, 8, 8, 8), 13),
    "one of many": ((1, 3, 70, 4, 24, 8, 8, 8), 1),
}
ATOL = 1000 * torch.finfo(torch.float64).eps
"""How far two orders of the same float64 sums of numbers around 1 may differ: an eps per term, a few hundred terms."""


def make(sizes, named, dtype=torch.float32):
    """(q_latent, q_rope, latent, k_rope), indices without repetition, and the scale."""
    x = make_inputs(sizes, dtype)
    return x.absorbed, torch.rand(sizes[0], sizes[1], sizes[2]).topk(named).indices, x.scale


def as_mask(indices, tokens, case):
    """A mask over all keys that hides the same keys as distinct indices and a mask; and the causal offset."""
    mask, causal_offset = case
    batch, queries, _ = indices.shape
    counts = torch.zeros(batch, queries, tokens + 1).scatter_(2, indices.where(indices >= 0, tokens).long(), 1.0)
    seen = (counts[..., :tokens] > 0)[:, None]
    if mask is None or mask.dtype == torch.bool:
        return (seen if mask is None else seen & mask), causal_offset
    return torch.where(seen, mask, -torch.inf), causal_offset


def assert_right(arguments, indices, case, scale, uniform=False):
    o, lse = sparse_latent_attention(*arguments, indices, *case, scale, uniform)
    exact = sparse_latent_attention_reference(*(t.double() for t in arguments), indices, *case, scale, uniform)
    scaled = [q * scale for q in arguments[:2]]  # the op scales queries
    measure = (
        sparse_latent_attention_reference(*arguments, indices, *case, scale, uniform),
        sparse_latent_attention_reference(*scaled, *arguments[2:], indices, *case, 1.0, uniform),
    )
    for actual, wanted, *both in zip((o, lse), exact, *measure, strict=True):
        assert_as_close_as(worse(*both, wanted).to(actual.dtype), actual, wanted)
    assert o.is_contiguous()


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("sizes", "named"), SIZES.values(), ids=SIZES)
def test_reference_is_latent_attention_under_a_mask(sizes, named, mask):
    arguments, indices, scale = make(sizes, named, torch.float64)
    case = case_of(sizes, mask)
    o, lse = sparse_latent_attention_reference(*arguments, indices, *case, scale, False)
    expected = latent_attention_reference(*arguments, *as_mask(indices, sizes[2], case), scale)
    torch.testing.assert_close(o, expected[0], rtol=0, atol=ATOL)
    torch.testing.assert_close(lse, expected[1], rtol=ATOL, atol=ATOL)


@pytest.mark.diagonal
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("sizes", "named"), SIZES.values(), ids=SIZES)
def test_float32(implementation, sizes, named, mask, uniform):
    arguments, indices, scale = make(sizes, named)
    assert_right(arguments, indices, case_of(sizes, mask), scale, uniform)


@pytest.mark.parametrize("mask", ["none", "causal", "left padding and causal", "bias of -inf"])
def test_blocks_of_queries(monkeypatch, no_compiler, mask):
    monkeypatch.setattr(aten, "_BLOCK_ELEMENTS", 3 * 32 * 9)
    sizes = (2, 7, 40, 4, 24, 8, 8, 8)
    arguments, indices, scale = make(sizes, 9)
    assert_right(arguments, indices, masks(2, 4, 7, 40)[mask], scale)


@pytest.mark.parametrize("mask", ["none", "causal", "left padding and causal", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(implementation, dtype, mask):
    sizes = (2, 3, 60, 4, 64, 16, 8, 16)
    arguments, indices, scale = make(sizes, 20, dtype)
    tensor, causal_offset = masks(2, 4, 3, 60)[mask]
    tensor = tensor.to(dtype) if tensor is not None and tensor.dtype != torch.bool else tensor
    assert_right(arguments, indices, (tensor, causal_offset), scale)


def test_masks_may_be_wider_than_the_tensors(implementation):
    arguments, indices, scale = make(*SIZES["several tokens"])
    bias = torch.randn(2, 1, 5, 60)
    wide, narrow = (
        sparse_latent_attention(*arguments, indices, mask, None, scale, False) for mask in (bias.double(), bias)
    )
    assert all(map(torch.equal, wide, narrow))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_decoding_takes_the_native_kernel(monkeypatch, dtype):
    monkeypatch.setattr(native, "attend_with_aten", None)
    arguments, indices, scale = make((2, 3, 60, 4, 64, 16, 8, 16), 20, dtype)
    seen = torch.rand(2, 1, 3, 60) < 0.7
    for case in ((None, None), (None, 57), (seen, 57)):
        assert_right(arguments, indices, case, scale)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_indices_that_name_no_key_are_skipped(implementation, dtype):
    sizes = (2, 3, 20, 4, 24, 8, 8, 8)
    arguments, indices, scale = make(sizes, 8)
    without, _ = sparse_latent_attention(*arguments, indices[..., :5], None, None, scale, False)
    indices = indices.to(dtype)
    for nothing in (-1, -7, 20, 10**6):
        indices[..., 5:] = nothing
        o, _ = sparse_latent_attention(*arguments, indices, None, None, scale, False)
        torch.testing.assert_close(o, without, rtol=0, atol=torch.finfo(torch.float32).eps * without.abs().max())
    assert_right(arguments, indices, (None, 17), scale)


def test_an_index_that_is_named_twice_counts_twice():
    arguments, indices, scale = make((1, 2, 20, 4, 24, 8, 8, 8), 6, torch.float64)
    doubled = torch.cat([indices, indices[..., :2]], -1)
    weight = torch.zeros(1, 1, 2, 20).scatter_(3, indices[:, None, :, :2], 2.0).clamp_min(1.0).double().log()
    mask, _ = as_mask(indices, 20, (weight, None))
    expected = latent_attention_reference(*arguments, mask, None, scale)
    o, lse = sparse_latent_attention(*arguments, doubled, None, None, scale, False)
    torch.testing.assert_close(o, expected[0], rtol=0, atol=ATOL)
    # Computed in float64, lse is rounded to float32.
    torch.testing.assert_close(lse, expected[1].float(), rtol=torch.finfo(torch.float32).eps, atol=ATOL)


@pytest.mark.parametrize("uniform", [False, True])
def test_rows_without_a_key(implementation, uniform):
    arguments, indices, scale = make((2, 4, 30, 4, 24, 8, 8, 8), 6)
    indices[0, 1] = -1
    mask = torch.ones(2, 1, 4, 30, dtype=torch.bool)
    mask[1, 0, 2] = False
    o, lse = sparse_latent_attention(*arguments, indices, mask, None, scale, uniform)
    for b, i in ((0, 1), (1, 2)):
        assert torch.equal(lse[b, i], torch.full((4,), -torch.inf))
        expected = arguments[2][b].mean(0) if uniform else torch.zeros(24)
        assert torch.equal(o[b, i], expected.expand(4, -1))
    assert lse.isfinite().sum() == 4 * (2 * 4 - 2)
    assert_right(arguments, indices, (mask, None), scale, uniform)


def test_what_nothing_attends_to_may_be_nan(implementation):
    arguments, indices, scale = make((1, 3, 30, 4, 24, 8, 8, 8), 12)
    expected = sparse_latent_attention(*arguments, indices, None, 20, scale, False)
    arguments[2][:, 23:] = torch.nan
    arguments[3][:, 23:] = torch.nan
    o, lse = sparse_latent_attention(*arguments, indices, None, 20, scale, False)
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])


STEP = {"FP8": 1 / 16, "FP8 of one scale": 1 / 16, "INT8": 1 / 254, "INT4": 1 / 14}
"""The greatest error of rounding: e4m3 keeps four significant bits; integers have steps of 1/127 or 1/7 of the greatest
number."""


def in_few_bits(arguments, dtype, kind):
    """The arguments with their cache in FP8, of DeepSeek's layout or with one scale for everything, INT8 or INT4."""
    q_latent, q_rope, latent, k_rope = arguments
    batch, tokens, rank = latent.shape
    width = k_rope.shape[2]
    if kind in ("INT8", "INT4"):
        numbers, scales = {"INT8": int8, "INT4": int4}[kind].quantised(latent)
        return (q_latent, q_rope, numbers, k_rope), scales
    slots, scale = torch.arange(batch * tokens), latent.abs().max().float() / 448
    both = latent.flatten(0, 1), k_rope.flatten(0, 1)
    if kind == "FP8 of one scale":
        rows = torch.zeros(batch, tokens, rank + width, dtype=torch.float8_e4m3fn)
        torch.ops.mla.append_latents(*both, slots, rows, scale)
        return (q_latent, q_rope, rows[..., :rank], rows[..., rank:]), scale.view(1, 1, 1)
    layout = RowLayout(rank, width, dtype)
    rows = torch.zeros(batch, tokens, layout.row_bytes, dtype=torch.uint8)
    torch.ops.mla.append_latents(*both, slots, rows)
    numbers, scales, ropes = layout.views(rows)
    return (q_latent, q_rope, numbers, ropes), scales


def check_few_bits(op, dtype, kind, uniform):
    arguments, indices, scale = make((2, 3, 30, 4, 256, 8, 8, 8), 12, dtype)
    indices[1, 2] = -1
    given, scales = in_few_bits(arguments, dtype, kind)
    o, lse = op(*given, indices, None, 28, scale, uniform, scales)
    wide = [t.double() if t.dtype == dtype else t for t in given]
    exact = sparse_latent_attention_reference(*wide, indices, None, 28, scale, uniform, scales)
    measure = sparse_latent_attention_reference(*given, indices, None, 28, scale, uniform, scales)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])
    unquantised = sparse_latent_attention_reference(*arguments, indices, None, 28, scale, uniform)[0]
    # An average is off by as much as its values, and by as much again for its weights; half precision rounds besides.
    off = 2 * STEP[kind] + torch.finfo(dtype).eps
    assert (o.double() - unquantised.double()).abs().max() < off * arguments[2].abs().max()


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("kind", STEP)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_bits(implementation, dtype, kind, uniform):
    check_few_bits(sparse_latent_attention, dtype, kind, uniform)


def test_fp8_wants_scales_of_the_cache():
    arguments, indices, scale = make((2, 3, 30, 4, 256, 8, 8, 8), 12)
    given, scales = in_few_bits(arguments, torch.float32, "FP8")
    with pytest.raises(KernelError, match=r"latent_scales that broadcasts to \[B, T, G\] = .* found \[2, 29, 2\]"):
        sparse_latent_attention(*given, indices, None, None, scale, False, scales[:, 1:])
    with pytest.raises(KernelError, match=r"expected latent, with latent_scales given, of torch.float8_e4m3fn"):
        sparse_latent_attention(*arguments, indices, None, None, scale, False, scales)


def test_no_keys_and_no_queries(implementation):
    arguments, indices, scale = make((2, 3, 7, 4, 24, 8, 8, 8), 0)
    for uniform in (False, True):
        o, lse = sparse_latent_attention(*arguments, indices, None, None, scale, uniform)
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))
        assert torch.equal(o[:, 0, 0], arguments[2].mean(1) if uniform else torch.zeros(2, 24))
    arguments, indices, scale = make((2, 3, 0, 4, 24, 8, 8, 8), 0)
    o, _ = sparse_latent_attention(*arguments, indices.new_full((2, 3, 4), -1), None, None, scale, True)
    assert torch.equal(o, torch.zeros_like(o))
    arguments, indices, scale = make((2, 0, 3, 4, 24, 8, 8, 8), 2)
    assert sparse_latent_attention(*arguments, indices, None, None, scale, False)[0].shape == (2, 0, 4, 24)


def test_work_and_memory_do_not_know_the_length_of_the_cache():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):
        """Counts the elements of all tensors that operations return, except views."""

        def __init__(self):
            super().__init__()
            self.elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not function.is_view and not result._is_view():
                self.elements += result.numel()
            return result

    made = []
    for tokens in (64, 4096):
        arguments, indices, scale = make((1, 2, tokens, 4, 24, 8, 8, 8), 16)
        mask = torch.rand(1, 1, 2, tokens) < 0.5
        with Sizes() as sizes:
            aten.sparse_latent_attention_aten(*arguments, indices, mask, tokens - 2, scale, False)
        made.append(sizes.elements)
    assert made[0] == made[1] > 0


@pytest.mark.parametrize(
    "case", [(None, None), (None, 2), (torch.rand(1, 1, 3, 5) < 0.5, None), (torch.randn(2, 4, 3, 5), 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype, case):
    arguments, indices, scale = make((2, 3, 5, 4, 24, 8, 8, 8), 3, dtype)
    torch.library.opcheck(sparse_latent_attention.default, (*arguments, indices, *case, scale, True))


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (1, torch.randn(2, 3, 5, 8), r"expected q_rope of shape \[B, Sq, N, R\] = \[2, 3, 4, 8\], found"),
        (4, torch.zeros(2, 2, 5, dtype=torch.long), r"expected indices of shape \[B, Sq, topk\] = \[2, 3, 5\], found"),
        (4, torch.zeros(2, 3), r"expected indices of shape \[B, Sq, topk\], found \[2, 3\]"),
        (4, torch.zeros(2, 3, 5), "expected indices of torch.int32 or torch.int64 on cpu, found torch.float32"),
        (5, torch.ones(2, 6), r"broadcasts to \[B, N, Sq, T\] = \[2, 4, 3, 6\], found \[2, 6\]"),
    ],
)
def test_refuses(position, wrong, message):
    arguments, indices, scale = make((2, 3, 6, 4, 24, 8, 8, 8), 5)
    arguments = [*arguments, indices, None, None, scale, False]
    arguments[position] = wrong
    with pytest.raises(KernelError, match=message):
        sparse_latent_attention(*arguments)
