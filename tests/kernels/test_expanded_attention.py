"""mla::expanded_attention against float64, for many sizes, masks, dtypes, layouts and workspaces."""

from dataclasses import replace

import pytest
import torch

from mla_compile.errors import KernelError
from mla_compile.kernels import visibility
from mla_compile.kernels.expanded_attention import aten, chunks, expanded_attention_reference
from tests.memory import peak

from .errors import assert_as_close_as
from .naive import MASKS, case_of, make_inputs, naive_mla

expanded_attention = torch.ops.mla.expanded_attention

# B, Sq, T, N, L, P, R, V
SIZES = {
    "decode": (2, 1, 70, 4, 24, 8, 4, 8),
    "prefill": (1, 150, 150, 18, 24, 16, 8, 16),
    "prefill after a context": (2, 33, 81, 3, 11, 7, 5, 9),
    "no rope, wide values": (3, 9, 20, 2, 16, 5, 0, 12),
    "one key": (9, 1, 1, 1, 5, 3, 1, 2),
}
HALF = {
    "a context": (2, 5, 60, 4, 64, 16, 8, 16),
    "odd widths": (1, 41, 99, 3, 33, 5, 7, 13),
    "no rope": (2, 3, 20, 2, 16, 5, 0, 12),
}
ATOL = 1000 * torch.finfo(torch.float64).eps
"""How far two orders of the same float64 sums of numbers around 1 may differ: an eps per term, a few hundred terms."""


def assert_right(x, case, workspace_tokens):
    """Check the op against float64, with naive MLA in the dtype of the inputs as the measure of error."""
    o, lse = expanded_attention(*x.tensors, *case, x.scale, workspace_tokens)
    exact, exact_lse = expanded_attention_reference(
        *x.map(torch.Tensor.double).tensors, *case, x.scale, workspace_tokens
    )
    eager, eager_lse = naive_mla(x, case)
    merges = -(-x.latent.shape[1] // workspace_tokens)
    assert_as_close_as(eager, o, exact, merges)
    assert_as_close_as(eager_lse.float(), lse, exact_lse, merges)
    assert o.is_contiguous()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_reference_is_naive_mla(sizes, mask):
    x = make_inputs(sizes, torch.float64)
    case = case_of(sizes, mask)
    o, lse = expanded_attention_reference(*x.tensors, *case, x.scale, 32)
    expected, expected_lse = naive_mla(x, case)
    torch.testing.assert_close(o, expected, rtol=0, atol=ATOL)
    torch.testing.assert_close(lse, expected_lse, rtol=ATOL, atol=ATOL)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.usefixtures("implementation")
def test_float32(sizes, mask):
    case = case_of(sizes, mask)
    assert_right(make_inputs(sizes), case, workspace_tokens=32)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("implementation")
def test_rope_keys_of_each_head(dtype, sizes, mask):
    assert_right(make_inputs(sizes, dtype).with_own_ropes(), case_of(sizes, mask, dtype), workspace_tokens=32)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("implementation")
def test_a_latent_for_keys_and_one_for_values(dtype, sizes, mask):
    x, rank = make_inputs(sizes, dtype), sizes[4]
    for of_keys in (rank // 3, rank // 2):
        assert_right(x.with_two_latents(of_keys), case_of(sizes, mask, dtype), workspace_tokens=32)


@pytest.mark.usefixtures("implementation")
def test_keys_without_nope_columns_come_from_no_latent():
    x = make_inputs((2, 5, 9, 2, 6, 0, 4, 8))
    assert_right(x.with_two_latents(0), (None, 4), workspace_tokens=4)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", HALF.values(), ids=HALF)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("implementation")
def test_half_precision(dtype, mask, sizes):
    assert_right(make_inputs(sizes, dtype), case_of(sizes, mask, dtype), workspace_tokens=32)


@pytest.mark.parametrize("mask", MASKS)
def test_float64(mask):
    sizes = (2, 5, 60, 4, 24, 16, 8, 16)
    x = make_inputs(sizes, torch.float64)
    case = case_of(sizes, mask)
    o, lse = expanded_attention(*x.tensors, *case, x.scale, 32)
    expected, expected_lse = expanded_attention_reference(*x.tensors, *case, x.scale, 32)
    torch.testing.assert_close(o, expected, rtol=0, atol=ATOL)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, expected_lse.float(), rtol=torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("workspace_tokens", [1, 7, 64, 70, 1000])
@pytest.mark.usefixtures("implementation")
def test_any_workspace(workspace_tokens, mask):
    sizes = (2, 41, 70, 3, 11, 7, 5, 9)
    case = case_of(sizes, mask)
    assert_right(make_inputs(sizes), case, workspace_tokens)


@pytest.mark.parametrize("implementation", ["native", "aten"], indirect=True)  # C++ alone has other tiles
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.usefixtures("implementation")
def test_tiles_of_queries_and_heads(monkeypatch, mask):
    monkeypatch.setattr(aten, "_QUERIES", 16)
    monkeypatch.setattr(chunks, "_MASKED_QUERIES", 8)
    monkeypatch.setattr(aten, "_TRIANGLE", 4)
    monkeypatch.setattr(chunks, "HEADS", 2)
    sizes = (2, 41, 70, 3, 11, 7, 5, 9)
    assert_right(make_inputs(sizes), case_of(sizes, mask), workspace_tokens=32)


@pytest.mark.usefixtures("implementation")
def test_every_causal_offset():
    x = make_inputs((1, 9, 12, 2, 11, 7, 5, 9))
    for causal_offset in range(-10, 14):
        for workspace_tokens in (1, 4, 12):
            assert_right(x, (None, causal_offset), workspace_tokens)


@pytest.mark.usefixtures("implementation")
def test_any_strides():
    x = make_inputs((2, 3, 40, 4, 24, 8, 8, 8)).map(lambda t: t.transpose(1, -1).contiguous().transpose(1, -1))
    assert not any(t.is_contiguous() for t in x.tensors)
    own = x.with_own_ropes()
    own = replace(own, k_rope=own.k_rope.transpose(1, 3).contiguous().transpose(1, 3))
    bias = torch.randn(1, 40, 3, 4).transpose(1, 3)
    for case in ((None, 37), (bias, None), (bias[..., :1], None), (bias[..., :1] < 0, 37)):
        assert_right(x, case, workspace_tokens=16)
        assert_right(own, case, workspace_tokens=16)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("queries", [1, 4, 60])
@pytest.mark.usefixtures("implementation")
def test_keys_that_no_query_sees_may_hold_nan(monkeypatch, queries, synchronous):
    monkeypatch.setattr(visibility, "reads_values", lambda mask: synchronous)
    monkeypatch.setattr(chunks, "reads_values", lambda mask: synchronous)
    x = make_inputs((2, queries, 90, 4, 24, 8, 8, 8))
    written = (torch.arange(90) > 3) & (torch.arange(90) < 61) & (torch.arange(90) % 16 != 9)
    mask = written & (torch.rand(2, 1, queries, 90) < 0.7)
    unseen = ~mask.any(2)[:, 0]
    expected = expanded_attention(*x.tensors, mask, None, x.scale, 16)
    x.latent[unseen] = torch.nan
    x.k_rope[unseen] = torch.nan
    for actual, wanted in zip(expanded_attention(*x.tensors, mask, None, x.scale, 16), expected, strict=True):
        assert torch.equal(actual, wanted)
    own = x.with_own_ropes()
    own.k_rope[unseen] = torch.nan
    assert all(t.isfinite().all() for t in expanded_attention(*own.tensors, mask, None, x.scale, 16))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.usefixtures("no_compiler")
def test_without_flash_attention_and_without_looking_at_mask_values(monkeypatch, mask):
    monkeypatch.setattr(visibility, "reads_values", lambda mask: False)
    monkeypatch.setattr(chunks, "reads_values", lambda mask: False)
    monkeypatch.setattr(aten, "_attend", aten._attend_composed)
    sizes = (2, 41, 70, 3, 11, 7, 5, 9)
    assert_right(make_inputs(sizes), case_of(sizes, mask), workspace_tokens=32)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("implementation")
def test_memory_does_not_depend_on_the_number_of_keys(masked):
    """It takes copies of the queries, the output, and the scores, keys and values of a chunk for all heads at most."""
    heads, queries, workspace_tokens, nope, rope, value = 32, 64, 64, 16, 8, 16
    taken = []
    for tokens in (512, 1024):
        x = make_inputs((1, queries, tokens, heads, 32, nope, rope, value))
        mask = torch.ones(1, 1, queries, tokens, dtype=torch.bool).tril(tokens - queries)
        case = (mask, None) if masked else (None, tokens - queries)
        taken.append(peak(lambda x=x, case=case: expanded_attention(*x.tensors, *case, x.scale, workspace_tokens)))
    assert taken[0] == taken[1]
    width = nope + rope + value
    of_a_head = queries * width + workspace_tokens * (queries + width)
    assert taken[0] <= heads * of_a_head * 4


@pytest.mark.parametrize("case", [(None, None), (None, 2), (torch.rand(1, 1, 3, 5) < 0.5, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype, case):
    x = make_inputs((2, 3, 5, 4, 24, 8, 8, 8), dtype)
    for operands in (x, x.with_own_ropes(), x.with_two_latents(10)):
        torch.library.opcheck(expanded_attention.default, (*operands.tensors, *case, x.scale, 2))


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (
            0,
            torch.randn(2, 3, 4, 15),
            r"expected q of shape \[B, Sq, N, P\+R\] = \[2, 3, 4, 16\], found \[2, 3, 4, 15\]",
        ),
        (2, torch.randn(2, 5, 8), r"expected k_rope of shape \[B, T, R\] = \[2, 6, 8\], found \[2, 5, 8\]"),
        (2, torch.randn(2, 6, 3, 8), r"expected k_rope of shape \[B, T, N, R\] = \[2, 6, 4, 8\], found \[2, 6, 3, 8\]"),
        (3, torch.randn(3, 8, 24), r"expected w_uk of shape \[N, P, Lk\] = \[4, 8, 24\], found \[3, 8, 24\]"),
        (3, torch.randn(4, 8, 20), "of L = 24, or of two sizes that add up to it, found 20 and 24"),
        (4, torch.randn(32, 24), r"expected w_uv of shape \[N, V, L\], found \[32, 24\]"),
        (4, torch.randn(4, 8, 24).half(), "expected w_uv of q's torch.float32 on cpu, found torch.float16"),
        (5, torch.ones(2, 6), r"broadcasts to \[B, N, Sq, T\] = \[2, 4, 3, 6\], found \[2, 6\]"),
        (8, 0, "expected workspace_tokens of at least 1, found 0"),
    ],
)
def test_refuses(position, wrong, message):
    x = make_inputs((2, 3, 6, 4, 24, 8, 8, 8))
    arguments = [*x.tensors, None, None, x.scale, 4]
    arguments[position] = wrong
    with pytest.raises(KernelError, match=message):
        expanded_attention(*arguments)


@pytest.mark.parametrize("fill", [-1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("workspace_tokens", [1, 4, 11])
@pytest.mark.usefixtures("implementation")
def test_a_row_that_a_number_hides_everywhere_is_uniform(fill, workspace_tokens):
    q, latent, k_rope = torch.randn(1, 3, 2, 6), torch.randn(1, 11, 5), torch.randn(1, 11, 2)
    w_uk, w_uv = torch.randn(2, 4, 5), torch.randn(2, 3, 5)
    mask = torch.zeros(1, 1, 3, 11)
    mask[:, :, 1] = fill
    o, lse = torch.ops.mla.expanded_attention(q, latent, k_rope, w_uk, w_uv, mask, None, 0.4, workspace_tokens)
    exact, exact_lse = expanded_attention_reference(
        *(t.double() for t in (q, latent, k_rope, w_uk, w_uv)), mask.double(), None, 0.4, workspace_tokens
    )
    uniform = torch.einsum("btl,nvl->bnv", latent, w_uv) / 11
    torch.testing.assert_close(o[:, 1], uniform)
    torch.testing.assert_close(o[:, ::2], exact[:, ::2].float())
    torch.testing.assert_close(lse, exact_lse.float())


@pytest.mark.parametrize("mask", ["causal", "left padding and causal"])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scales_that_are_not_positive(scale, mask, dtype):
    """torch's flash attention on CPU multiplies -inf by them."""
    sizes = SIZES["prefill after a context"]
    x, case = replace(make_inputs(sizes, dtype), scale=scale), case_of(sizes, mask, dtype)
    exact = expanded_attention_reference(*x.map(torch.Tensor.double).tensors, *case, x.scale, 64)
    eager = naive_mla(x, case)[0]
    for op in (expanded_attention, aten.expanded_attention_aten):
        assert_as_close_as(eager, op(*x.tensors, *case, x.scale, 64)[0], exact[0], 2)
