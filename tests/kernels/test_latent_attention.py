"""mla::latent_attention against float64, for many sizes, masks, dtypes and layouts."""

import pytest
import torch

from mla_compile.errors import KernelError
from mla_compile.kernels import visibility
from mla_compile.kernels.latent_attention import aten, latent_attention_reference, native

from .errors import assert_as_close_as, worse
from .naive import MASKS, case_of, make_inputs, naive_mla

latent_attention = torch.ops.mla.latent_attention

# B, Sq, T, N, L, P, R, V
SIZES = {
    "decode": (1, 1, 300, 16, 64, 16, 8, 16),
    "batch": (5, 1, 37, 4, 24, 8, 4, 8),
    "several tokens": (2, 5, 129, 3, 33, 5, 7, 9),
    "no rope": (3, 4, 50, 2, 16, 8, 0, 8),
    "one key": (2, 1, 1, 1, 5, 3, 1, 2),
    "many queries": (1, 150, 200, 16, 24, 8, 4, 8),
}
ATOL = 1000 * torch.finfo(torch.float64).eps
"""How far two orders of the same float64 sums of numbers around 1 may differ: an eps per term, a few hundred terms."""


def double(*tensors):
    return tuple(t.double() for t in tensors)


def assert_right(arguments, case, scale):
    """Check the op against float64, with the reference in the dtype of the inputs as the measure of error."""
    o, lse = latent_attention(*arguments, *case, scale)
    exact = latent_attention_reference(*double(*arguments), *case, scale)
    scaled = [q * scale for q in arguments[:2]]  # the op scales queries
    measure = (
        latent_attention_reference(*arguments, *case, scale),
        latent_attention_reference(*scaled, *arguments[2:], *case, 1.0),
    )
    for actual, wanted, *both in zip((o, lse), exact, *measure, strict=True):
        assert_as_close_as(worse(*both, wanted).to(actual.dtype), actual, wanted)
    assert o.is_contiguous()


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_reference_is_naive_mla(sizes, mask):
    x = make_inputs(sizes, torch.float64)
    case = case_of(sizes, mask)
    o_latent, lse = latent_attention_reference(*x.absorbed, *case, x.scale)
    o, expected_lse = naive_mla(x, case)
    torch.testing.assert_close(torch.einsum("bsnl,nvl->bsnv", o_latent, x.w_uv), o, rtol=0, atol=ATOL)
    torch.testing.assert_close(lse, expected_lse, rtol=ATOL, atol=ATOL)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_float32(implementation, sizes, mask):
    x = make_inputs(sizes)
    assert_right(x.absorbed, case_of(sizes, mask), x.scale)


# Rows, rank, rope and keys that fill less than a tile, exactly one, and many; more sequences than threads, and fewer.
TILES = {
    "one of everything": (1, 1, 1, 1, 1, 1, 1, 1),
    "one block of keys": (1, 1, 64, 16, 64, 8, 64, 8),
    "many blocks and a few keys": (1, 1, 4099, 16, 64, 8, 16, 8),
    "many rows": (1, 3, 131, 37, 24, 8, 8, 8),
    "no rope, rank of no vector": (3, 2, 200, 5, 5, 4, 0, 4),
    "columns of each kind": (2, 1, 65, 7, 64 + 16 + 3, 4, 3, 4),
    "sequences of one block": (5, 1, 9, 3, 24, 4, 4, 4),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("sizes", TILES.values(), ids=TILES)
def test_tiles_and_threads(monkeypatch, sizes, threads, mask):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = make_inputs(sizes)
    assert_right(x.absorbed, case_of(sizes, mask), x.scale)


def test_float32_rows_over_a_range_of_keys_take_the_native_kernel(monkeypatch):
    x = make_inputs((2, 3, 50, 4, 24, 8, 8, 8))
    monkeypatch.setattr(native, "attend_with_aten", None)
    latent_attention(*x.absorbed, torch.arange(50) < torch.tensor([50, 7])[:, None, None, None], 47, x.scale)


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_keys_and_queries(monkeypatch, no_compiler, chunk, mask):
    sizes = (3, 5, 70, 4, 24, 8, 8, 8)
    monkeypatch.setattr(aten, "_CHUNK_ELEMENTS", chunk * 32)
    monkeypatch.setattr(aten, "_ROWS", 8)
    x = make_inputs(sizes)
    assert_right(x.absorbed, case_of(sizes, mask), x.scale)


# More rows than the kernel of a few takes: panels of them end at a query, within one, and at a rest.
MANY = {
    "whole queries": (2, 32, 130, 16, 24, 8, 4, 8),
    "parts of queries": (1, 83, 300, 5, 33, 8, 7, 8),
    "more heads than rows of a panel": (1, 9, 131, 37, 16, 8, 8, 8),
    "no rope, more keys than at a time": (1, 130, 4200, 2, 18, 8, 0, 8),
    "one head": (2, 300, 310, 1, 24, 8, 4, 8),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", MANY.values(), ids=MANY)
def test_many_queries(monkeypatch, sizes, mask, dtype):
    monkeypatch.setattr(native, "attend_with_aten", None)
    if dtype == torch.float32:
        x = make_inputs(sizes)
        assert_right(x.absorbed, case_of(sizes, mask), x.scale)
    else:
        assert_right_in_half(sizes, mask, dtype)


# Queries that fill no panel, several with a rest, and few rows.
IN_HALF = {
    "one panel": (2, 32, 40, 3, 24, 8, 4, 8),
    "panels and a rest": (1, 83, 300, 4, 33, 8, 7, 8),
    "more heads": (1, 33, 131, 19, 16, 8, 8, 8),
    "no rope, more keys than at a time": (1, 40, 4200, 2, 18, 8, 0, 8),
    "fewer queries than a panel": (1, 31, 90, 3, 24, 8, 4, 8),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", IN_HALF.values(), ids=IN_HALF)
def test_many_queries_in_half_precision(sizes, mask, dtype):
    assert_right_in_half(sizes, mask, dtype)


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="the CPU multiplies no pairs of bfloat16")
def test_many_queries_of_few_rows_in_bfloat16_take_no_float32_products(monkeypatch):
    x = make_inputs((1, 40, 90, 3, 24, 8, 4, 8), torch.bfloat16)
    monkeypatch.setattr(native, "attend_with_aten", None)
    monkeypatch.setattr(native, "attend", None)  # the kernel of few rows
    latent_attention(*x.absorbed, None, 50, x.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_many_queries_of_any_strides(monkeypatch, dtype):
    monkeypatch.setattr(native, "attend_with_aten", None)
    x = make_inputs((2, 20, 130, 19, 24, 8, 8, 8), dtype)
    expected = latent_attention(*x.absorbed, None, 110, x.scale)
    for first, second in ((1, 2), (1, 3), (2, 3)):
        queries = [q.transpose(first, second).contiguous().transpose(first, second) for q in x.absorbed[:2]]
        keys = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x.absorbed[2:]]
        for actual, wanted in zip(latent_attention(*queries, *keys, None, 110, x.scale), expected, strict=True):
            assert torch.equal(actual, wanted)


def test_few_float32_keys_of_many_queries_are_left_to_matrix_products(monkeypatch):
    x = make_inputs((1, 20, 127, 16, 24, 8, 4, 8))
    monkeypatch.setattr(native, "attend_many", None)
    assert_right(x.absorbed, (None, None), x.scale)
    with pytest.raises(TypeError):
        latent_attention(*x.absorbed, None, 107, x.scale)  # a causal limit hides some


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, mask):
    assert_right_in_half((2, 3, 130, 4, 64, 16, 8, 16), mask, dtype)


def assert_right_in_half(sizes, mask, dtype):
    x = make_inputs(sizes, dtype)
    case, arguments = case_of(sizes, mask, dtype), x.absorbed
    o, lse = latent_attention(*arguments, *case, x.scale)
    exact = latent_attention_reference(*double(*arguments), *case, x.scale)
    eager = latent_attention_reference(*arguments, *case, x.scale)
    assert_as_close_as(eager[0], o, exact[0])
    assert_as_close_as(eager[1].float(), lse, exact[1])


@pytest.mark.parametrize("mask", MASKS)
def test_float64(mask):
    sizes = (2, 3, 130, 4, 64, 16, 8, 16)
    x = make_inputs(sizes, torch.float64)
    case = case_of(sizes, mask)
    o, lse = latent_attention(*x.absorbed, *case, x.scale)
    expected, expected_lse = latent_attention_reference(*x.absorbed, *case, x.scale)
    torch.testing.assert_close(o, expected, rtol=0, atol=ATOL)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse, expected_lse.float(), rtol=torch.finfo(torch.float32).eps, atol=0)


def test_as_close_to_float64_as_naive_mla_in_the_same_dtype(implementation):
    for dtype in (torch.float32, torch.bfloat16):
        x = make_inputs((2, 2, 200, 8, 64, 16, 8, 16), dtype)
        o_latent, lse = latent_attention(*x.absorbed, None, 198, x.scale)
        exact, exact_lse = naive_mla(x.map(torch.Tensor.double), (None, 198))
        eager, eager_lse = naive_mla(x, (None, 198))
        assert_as_close_as(eager, torch.einsum("bsnl,nvl->bsnv", o_latent, x.w_uv), exact)
        assert_as_close_as(eager_lse.float(), lse, exact_lse)


def test_any_strides(implementation):
    x = make_inputs((2, 3, 40, 4, 24, 8, 8, 8))
    arguments = x.absorbed
    strided = [t.transpose(1, -1).contiguous().transpose(1, -1) for t in arguments]
    assert not any(t.is_contiguous() for t in strided)
    bias = torch.randn(1, 40, 3, 4).transpose(1, 3)
    for case in ((None, 37), (bias, None), (bias[..., :1], None), (bias[..., :1] < 0, 37)):
        assert_right(strided, case, x.scale)
    one_key_for_all = x.latent[:, :1].expand(-1, 40, -1), x.k_rope[:, :1].expand(-1, 40, -1)
    assert_right((*arguments[:2], *one_key_for_all), (None, 37), x.scale)


POISONED = {
    "tail": torch.arange(90) < 61,
    "head": torch.arange(90) >= 13,
    "holes": torch.arange(90) % 7 != 3,
    "chunk": (torch.arange(90) < 32) | (torch.arange(90) >= 64),
}


@pytest.mark.parametrize(
    ("queries", "dtype"), [(1, torch.float32), (4, torch.float32), (40, torch.bfloat16), (70, torch.bfloat16)]
)
@pytest.mark.parametrize("written", POISONED.values(), ids=POISONED)
def test_keys_that_no_query_sees_may_hold_nan(monkeypatch, implementation, written, queries, dtype):
    monkeypatch.setattr(aten, "_CHUNK_ELEMENTS", 32 * 32)
    assert_unseen_keys_may_hold_nan(written, queries, dtype)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("written", POISONED.values(), ids=POISONED)
def test_keys_that_no_query_sees_may_hold_nan_where_mask_values_are_not_read(
    monkeypatch, no_compiler, written, queries
):
    monkeypatch.setattr(visibility, "reads_values", lambda mask: False)
    monkeypatch.setattr(aten, "_CHUNK_ELEMENTS", 32 * 32)
    assert_unseen_keys_may_hold_nan(written, queries)


def assert_unseen_keys_may_hold_nan(written, queries, dtype=torch.float32):
    x = make_inputs((2, queries, 90, 4, 24, 8, 8, 8), dtype)
    mask = (written & (torch.rand(2, 1, queries, 90) < 0.7)) | (torch.arange(90) == written.nonzero()[0])
    unseen = ~mask.any(2)[:, 0]
    arguments = x.absorbed
    expected = latent_attention(*arguments, mask, None, x.scale)
    for t in arguments[2:]:
        t[unseen] = torch.nan
    for actual, wanted in zip(latent_attention(*arguments, mask, None, x.scale), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_mask_and_causal_limit_together_hide_nan(implementation):
    x = make_inputs((1, 2, 8, 2, 8, 4, 4, 4))
    mask = torch.ones(1, 1, 2, 8, dtype=torch.bool)
    mask[..., 1, 5] = False  # the causal limit hides key 5 from the first query, the mask hides it from the second
    arguments = x.absorbed
    expected = latent_attention(*arguments, mask, 4, x.scale)
    arguments[2][:, 5:] = torch.nan
    actual = latent_attention(*arguments, mask, 4, x.scale)
    assert torch.equal(actual[0], expected[0])


@pytest.mark.parametrize("mask", MASKS)
def test_without_looking_at_mask_values(monkeypatch, no_compiler, mask):
    monkeypatch.setattr(visibility, "reads_values", lambda mask: False)
    sizes = (3, 4, 50, 4, 24, 8, 8, 8)
    x = make_inputs(sizes)
    assert_right(x.absorbed, case_of(sizes, mask), x.scale)


@pytest.mark.parametrize("implementation", ["native", "aten"], indirect=True)
def test_only_keys_that_are_seen_are_loaded(monkeypatch, implementation):
    loaded = []

    def take(tensor, keys, dim):
        loaded.append(len(keys))
        return visibility.take(tensor, keys, dim)

    monkeypatch.setattr({"native": native, "aten": aten}[implementation], "take", take)
    x = make_inputs((2, 1, 4096, 4, 24, 8, 8, 8))
    lengths = torch.tensor([200, 7])[:, None, None, None]
    latent_attention(*x.absorbed, torch.arange(4096) < lengths, None, x.scale)
    assert loaded == [200, 200, 7, 7]


def test_no_keys_and_no_queries(implementation):
    x = make_inputs((2, 3, 0, 4, 24, 8, 8, 8))
    o, lse = latent_attention(*x.absorbed, None, None, x.scale)
    assert torch.equal(o, torch.zeros_like(o))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    x = make_inputs((2, 0, 3, 4, 24, 8, 8, 8))
    assert latent_attention(*x.absorbed, None, None, x.scale)[0].shape == (2, 0, 4, 24)


@pytest.mark.parametrize(
    "case", [(None, None), (None, 2), (torch.rand(1, 1, 3, 5) < 0.5, None), (torch.randn(2, 4, 3, 5), 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype, case):
    x = make_inputs((2, 3, 5, 4, 24, 8, 8, 8), dtype)
    torch.library.opcheck(latent_attention.default, (*x.absorbed, *case, x.scale))


def test_inductor_passes_a_cache_on_without_a_copy():
    from torch._inductor.utils import run_and_get_code

    def step(q_latent, q_rope, cache, row):
        cache.index_copy_(1, torch.tensor([3]), row)
        return latent_attention(q_latent, q_rope, cache[..., :24], cache[..., 24:], None, None, 0.1)[0] * 2

    x = make_inputs((1, 1, 64, 4, 24, 8, 8, 8))
    q_latent, q_rope, _, _ = x.absorbed
    cache, row = torch.randn(1, 64, 32), torch.randn(1, 1, 32)
    expected = step(q_latent, q_rope, cache.clone(), row)
    actual, (code,) = run_and_get_code(torch.compile(step), q_latent, q_rope, cache, row)
    torch.testing.assert_close(actual, expected)
    assert "empty_strided_cpu((1, 64" not in code


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (
            1,
            torch.randn(2, 3, 5, 8),
            r"expected q_rope of shape \[B, Sq, N, R\] = \[2, 3, 4, 8\], found \[2, 3, 5, 8\]",
        ),
        (2, torch.randn(2, 6, 23), r"expected latent of shape \[B, T, L\] = \[2, 6, 24\], found \[2, 6, 23\]"),
        (2, torch.randn(2, 24), r"expected latent of shape \[B, T, L\], found \[2, 24\]"),
        (3, torch.randn(2, 6, 8).half(), "expected k_rope of q_latent's torch.float32 on cpu, found torch.float16"),
        (4, torch.ones(2, 6), r"broadcasts to \[B, N, Sq, T\] = \[2, 4, 3, 6\], found \[2, 6\]"),
        (4, torch.ones(1, 1, 1, 6, dtype=torch.long), "expected mask of a bool or floating dtype, found torch.int64"),
    ],
)
def test_refuses(position, wrong, message):
    x = make_inputs((2, 3, 6, 4, 24, 8, 8, 8))
    arguments = [*x.absorbed, None, None, x.scale]
    arguments[position] = wrong
    with pytest.raises(KernelError, match=message):
        latent_attention(*arguments)
