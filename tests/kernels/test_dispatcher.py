"""Ops that torch's dispatcher calls in C++: what is computed there, and what is passed on to Python."""

import logging
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mla_compile.errors import KernelError
from mla_compile.fp8 import FP8
from mla_compile.kernels import dispatcher, native
from mla_compile.kernels.expanded_attention import chunks, expanded_attention_reference
from mla_compile.kernels.expanded_attention import native as expanded_native
from mla_compile.kernels.latent_attention import latent_attention_reference
from mla_compile.kernels.latent_attention.arguments import LatentAttention
from mla_compile.kernels.latent_attention.many_queries import attend_many
from mla_compile.kernels.merge_states.arguments import MergeStates
from mla_compile.kernels.paged_expanded_attention import paged_expanded_attention_reference
from mla_compile.kernels.paged_expanded_attention.arguments import PagedExpandedAttention
from mla_compile.kernels.paged_latent_attention import paged_latent_attention_reference
from mla_compile.kernels.per_head_matmul import per_head_matmul_reference
from mla_compile.kernels.sparse_latent_attention import sparse_latent_attention_reference

from .conftest import withdraw
from .errors import assert_as_close_as
from .naive import MASKS, case_of, make_inputs, masks
from .paged import CODED, INT8, make_paged, make_paged_heads, quantised

SIZES = {
    "decode": (1, 1, 67, 8, 48, 24, 16, 24),
    "sequences and queries": (3, 4, 130, 5, 33, 8, 7, 8),
    "no keys": (2, 1, 0, 4, 16, 8, 8, 8),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_decode_step_runs_no_python(no_python, sizes, mask, threads, dtype):
    torch.set_num_threads(threads)
    x = make_inputs(sizes, dtype)
    case = case_of(sizes, mask, dtype)
    o, lse = torch.ops.mla.latent_attention(*x.absorbed, *case, x.scale)
    exact = latent_attention_reference(*(t.double() for t in x.absorbed), *case, x.scale)
    measure = latent_attention_reference(*x.absorbed, *case, x.scale)
    assert (o.shape, lse.dtype, o.is_contiguous()) == (measure[0].shape, torch.float32, True)
    if sizes[2]:
        assert_as_close_as(measure[0], o, exact[0])
        assert_as_close_as(measure[1].float(), lse, exact[1])
    else:
        assert (o == 0).all()
        assert (lse == -torch.inf).all()


NO_MASK = ["none", "causal", "causal, first queries see nothing", "causal, last keys unseen"]


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", NO_MASK)
@pytest.mark.parametrize(
    "sizes", [(2, 70, 131, 5, 33, 8, 7, 8), (1, 33, 4099, 9, 16, 8, 4, 8), (1, 3, 300, 128, 8, 4, 0, 4)]
)
def test_many_queries_without_a_mask_run_no_python(no_python, sizes, mask, dtype):
    """The numbers are those of `many_queries.py`, for queries and keys of any strides."""
    x, case = make_inputs(sizes, dtype), case_of(sizes, mask)
    for tensors in (x.absorbed, tuple(map(in_another_order, x.absorbed))):
        arguments = *tensors, *case, x.scale
        o, lse = torch.ops.mla.latent_attention(*arguments)
        again = attend_many(LatentAttention(*arguments))
        assert (o.is_contiguous(), torch.equal(o, again[0]), torch.equal(lse, again[1])) == (True, True, True)
        assert_right((o, lse), latent_attention_reference, arguments, merges=sizes[2] // 4096)


def in_another_order(tensor):
    """The same numbers with the first two dims exchanged in memory, and room between rows."""
    spread = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype).transpose(0, 1)
    return spread.contiguous().transpose(0, 1)[..., : tensor.shape[-1]].copy_(tensor)


def test_few_float32_keys_of_many_queries_are_left_to_python(no_python):
    """Matrix products are faster, unless a causal limit hides keys."""
    x = make_inputs((1, 100, 100, 5, 16, 8, 4, 8))
    torch.ops.mla.latent_attention(*x.absorbed, None, 0, x.scale)
    with pytest.raises(AssertionError, match="the general implementation was called"):
        torch.ops.mla.latent_attention(*x.absorbed, None, None, x.scale)


TENSORS = [name for name, (tensor, _) in masks(1, 1, 1, 1).items() if tensor is not None]
PAGES = {
    "decode": ([290, 0, 33, 2], (1, 4, 64, 32), 16),
    "several tokens": ([70, 5, 33], (3, 5, 33, 7), 7),
    "no rope": ([12], (2, 3, 16, 0), 64),
    "many queries": ([300, 0, 33, 70], (40, 7, 33, 9), 16),
}


def expanded_attention_of_python(*arguments):
    """The result of the general implementation, which `no_python` has replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expanded_native, "attend_in_chunks", chunks.attend_in_chunks)
        return torch.ops.mla.expanded_attention_general(*arguments)


def assert_right(results, reference, arguments, merges=0, **more):
    def wide(value):
        return value.double() if isinstance(value, torch.Tensor) and value.dtype == results[0].dtype else value

    masked = {"mask": wide(more["mask"])} if "mask" in more else {}
    exact, measure = reference(*map(wide, arguments), **more | masked), reference(*arguments, **more)
    assert_as_close_as(measure[0], results[0], exact[0], merges)
    assert_as_close_as(measure[1].float(), results[1], exact[1], merges)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("more", [{}, {"split_tokens": 32}, {"first_positions": (1, -9, 4, 500)}], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", PAGES.values(), ids=PAGES)
def test_a_decode_step_over_pages_runs_no_python(no_python, case, causal, more, index, dtype):
    x = make_paged(*case, dtype=dtype, index=index)
    if "first_positions" in more:
        more = {"first_positions": torch.tensor(more["first_positions"], dtype=index)[: len(case[0])]}
    arguments = *x.arguments, causal, x.scale
    results = torch.ops.mla.paged_latent_attention(*arguments, **more)
    assert_right(results, paged_latent_attention_reference, arguments, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("groups", "rope_too", "coded"), CODED)
@pytest.mark.parametrize("queries", [2, 90])
def test_a_decode_step_over_pages_in_few_bits_runs_no_python(no_python, queries, groups, rope_too, coded, dtype):
    x = make_paged([150, 0, 33], (queries, 3, 72, 8), 16, dtype)
    arguments, scales = quantised(x, groups, rope_too, coded)
    arguments = *arguments, True, x.scale
    results = torch.ops.mla.paged_latent_attention(*arguments, scales)
    assert_right(results, paged_latent_attention_reference, arguments, latent_scales=scales)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("split_tokens", [None, 32])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("coded", [None, (4, False, FP8), (1, True, INT8)], ids=["in the dtype", "fp8", "int8"])
@pytest.mark.parametrize("mask", [*TENSORS, "the same padding"])
@pytest.mark.parametrize(
    "case", [([290, 0, 33, 2], (1, 4, 64, 32), 16), ([70, 5, 33], (3, 5, 36, 7), 7)], ids=["decode", "several tokens"]
)
def test_a_decode_step_over_pages_under_a_mask_runs_no_python(
    no_python, case, mask, coded, causal, split_tokens, dtype
):
    lengths, (queries, heads, *_), _ = case
    x = make_paged(*case, dtype=dtype)
    arguments, scales = (x.arguments, None) if coded is None else quantised(x, *coded)
    if mask == "the same padding":
        hiding = torch.arange(max(lengths)).expand(1, 1, 1, -1) >= 30
    else:
        hiding, _ = case_of((len(lengths), queries, max(lengths), heads), mask, dtype)
    arguments = *arguments, causal, x.scale
    more = {"latent_scales": scales, "split_tokens": split_tokens, "mask": hiding}
    results = torch.ops.mla.paged_latent_attention(*arguments, **more)
    assert_right(results, paged_latent_attention_reference, arguments, **more)


def test_pages_whose_keys_cannot_be_numbered_are_left_to_python(dispatched):
    x = make_paged(*PAGES["several tokens"])
    pool = x.pool.new_full((x.pool.shape[0], 9, x.pool.shape[2]), torch.nan)[:, 1:8].copy_(x.pool)
    hiding = torch.rand(3, 1, 3, 70) < 0.7
    for some in (x, replace(x, pool=pool)):
        results = torch.ops.mla.paged_latent_attention(*some.arguments, True, x.scale, mask=hiding)
        arguments = *x.arguments, True, x.scale
        assert_right(results, paged_latent_attention_reference, arguments, mask=hiding)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("mask", "causal_offset", "uniform"),
    [
        *[("none", None, False), ("none", None, True), ("none", 20, True), ("none", -2, False)],
        *[("right padding", None, True), ("window", 20, False), ("scattered keys", None, False)],
        *[("some rows hidden", None, False), ("one value for all keys", 20, False)],
    ],
)
def test_named_keys_run_no_python(no_python, mask, causal_offset, uniform, dtype):
    sizes = (2, 3, 40, 4, 33, 8, 7, 8)
    x = make_inputs(sizes, dtype)
    mask = case_of(sizes, mask)[0]
    indices = torch.randint(-3, 44, (2, 6, 30))[:, ::2, ::2]
    indices[:, :, 0] = 0
    indices = indices.sort(-1).values
    indices[:, :, 1:][indices[:, :, 1:] == indices[:, :, :-1]] = -1
    arguments = *x.absorbed, indices, mask, causal_offset, x.scale, uniform
    assert_right(torch.ops.mla.sparse_latent_attention(*arguments), sparse_latent_attention_reference, arguments)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("workspace_tokens", [1, 32, 1000])
@pytest.mark.parametrize("mask", NO_MASK)
@pytest.mark.parametrize(
    "sizes", [(2, 33, 81, 3, 11, 7, 5, 9), (1, 40, 40, 18, 16, 8, 0, 16), (1, 0, 3, 2, 4, 4, 4, 4)]
)
def test_chunks_without_a_mask_run_no_python(no_python, sizes, mask, workspace_tokens, dtype):
    one, case = make_inputs(sizes, dtype), case_of(sizes, mask)
    for x in (one, one.with_two_latents(sizes[4] // 3)):
        arguments = *x.tensors, *case, x.scale, workspace_tokens
        o, lse = torch.ops.mla.expanded_attention(*arguments)
        again = expanded_attention_of_python(*arguments)
        assert torch.equal(o, again[0])
        assert torch.equal(lse, again[1])
        if sizes[1]:
            merged = -(-sizes[2] // workspace_tokens)
            assert_right((o, lse), expanded_attention_reference, arguments, merges=merged)


# lengths, (Sq, N, L, P, R, V), page_size
PAGES_OF_HEADS = {
    "prefill": ([70, 0, 3], (70, 18, 24, 16, 8, 12), 16),
    "odd widths": ([81, 40], (9, 3, 9, 7, 5, 9), 8),
    "no rope": ([20, 41], (20, 2, 21, 8, 0, 12), 1),
}


def of_python(op, bundle, *arguments, **more):
    """The result of an op's general implementation, which `no_python` has replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "check", lambda _: None)
        return getattr(torch.ops.mla, f"{op}_general")(*arguments, **more)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "cache",
    [None, (3, False, FP8), (1, True, FP8), (1, False, INT8), (1, True, INT8)],
    ids=["in the dtype", "fp8", "fp8 and its rope keys", "int8", "int8 and its rope keys"],
)
@pytest.mark.parametrize("counts", [None, (9, 0, 2)], ids=str)
@pytest.mark.parametrize("first", [None, (3, 30, -4)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", PAGES_OF_HEADS.values(), ids=PAGES_OF_HEADS)
def test_chunks_of_pages_run_no_python(no_python, case, causal, first, counts, cache, dtype):
    groups, rope_too, coded = cache or (None, False, FP8)
    x = make_paged_heads(*case, dtype, groups=groups, rope_too=rope_too, coded=coded)
    given = {"first_positions": first, "query_lens": counts}
    more = {name: None if value is None else torch.tensor(value[: len(case[0])]) for name, value in given.items()}
    if counts is not None:
        x.q[torch.arange(x.q.shape[1]) >= more["query_lens"][:, None]] = torch.nan
    arguments = *x.arguments, causal, x.scale, 20, x.scales
    o, lse = torch.ops.mla.paged_expanded_attention(*arguments, **more)
    again = of_python("paged_expanded_attention", PagedExpandedAttention, *arguments, **more)
    assert torch.equal(o, again[0])
    assert torch.equal(lse, again[1])
    assert_right((o, lse), paged_expanded_attention_reference, arguments, merges=-(-max(case[0]) // 20), **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (4, 3)], ids=str)
def test_merging_runs_no_python(no_python, shape, dtype):
    o_a, o_b = torch.randn(2, 5, *shape).to(dtype).movedim(1, -1)
    lse_a, lse_b = 10 * torch.randn(2, *shape)
    if shape == (4, 3):
        lse_a[:2], lse_b[1:3] = -torch.inf, -torch.inf
    o, lse = torch.ops.mla.merge_states(o_a, lse_a, o_b, lse_b)
    expected = of_python("merge_states", MergeStates, o_a, lse_a, o_b, lse_b)
    assert o.is_contiguous()
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("change", ["a page that is not", "a length that cannot be", "a page of no tokens"])
def test_pages_that_cannot_be_are_refused(dispatched, change):
    x = make_paged([20, 5], (1, 4, 16, 8), 8)
    if change == "a page that is not":
        x.block_table[1, 0] = len(x.pool)
    elif change == "a length that cannot be":
        x.seq_lens[1] = 1000
    arguments = list(x.arguments)
    if change == "a page of no tokens":
        arguments[2:4] = (part[:, :0] for part in arguments[2:4])
    with pytest.raises(KernelError, match="mla::paged_latent_attention: expected"):
        torch.ops.mla.paged_latent_attention(*arguments, True, x.scale)


def test_what_chunks_of_pages_refuse_is_named(dispatched):
    x = make_paged_heads([5, 9], (2, 3, 8, 4, 4, 6), 4)
    more = {"query_lens": torch.tensor([1, 3])}
    with pytest.raises(KernelError, match=r"expected query_lens from 0 to Sq = 2, found query_lens\[1\] = 3"):
        torch.ops.mla.paged_expanded_attention(*x.arguments, True, x.scale, 2, **more)
    x.cache[2][1, 0] = 1000
    with pytest.raises(KernelError, match=r"mla::paged_expanded_attention: expected pages from 0 to"):
        torch.ops.mla.paged_expanded_attention(*x.arguments, True, x.scale, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_few_rows_run_no_python(no_python, dtype, rows, transposed):
    x, weight = torch.randn(1, rows, 3, 20, dtype=dtype)[..., 4:], torch.randn(3, 16, 24, dtype=dtype)
    if transposed:
        weight = torch.randn(3, 24, 16, dtype=dtype).transpose(1, 2)
    out = torch.ops.mla.per_head_matmul(x, weight)
    exact, measure = per_head_matmul_reference(x.double(), weight.double()), per_head_matmul_reference(x, weight)
    assert_as_close_as(measure, out, exact)


@pytest.mark.parametrize("call", ["attention", "product"])
def test_what_has_no_kernel_goes_on_to_python(dispatched, call):
    x = make_inputs(SIZES["decode"], torch.float64)
    if call == "attention":
        actual, _ = torch.ops.mla.latent_attention(*x.absorbed, None, None, x.scale)
        expected, _ = latent_attention_reference(*x.absorbed, None, None, x.scale)
    else:
        actual = torch.ops.mla.per_head_matmul(x.q[..., :24], x.w_uk)
        expected = per_head_matmul_reference(x.q[..., :24], x.w_uk)
    # Sums in two orders, of some tens of products of numbers around 1.
    torch.testing.assert_close(actual, expected, rtol=0, atol=100 * torch.finfo(torch.float64).eps)


def test_a_kernel_that_is_taken_back_is_not_called(no_python):
    dispatcher.provide("per_head_matmul", (torch.float32,), None)
    with pytest.raises(AssertionError, match="the general implementation was called"):
        torch.ops.mla.per_head_matmul(torch.randn(1, 1, 3, 4), torch.randn(3, 4, 5))


def test_gradients_are_refused_when_they_are_asked_for(dispatched):
    x, indices = make_inputs((1, 3, 5, 2, 8, 4, 4, 4)), torch.zeros(1, 3, 2, dtype=torch.int64)
    q_latent, *others = x.absorbed
    with torch.enable_grad():
        arguments = q_latent.requires_grad_(), *others, indices, None, None, x.scale, False
        total = torch.ops.mla.sparse_latent_attention(*arguments)[0].sum()
    with pytest.raises(NotImplementedError, match="mla::sparse_latent_attention has no backward: expected inputs that"):
        total.backward()


@pytest.mark.parametrize("op", ["expanded_attention", "latent_attention", "per_head_matmul"])
def test_gradients_of_what_has_them(dispatched, op):
    """The formulas of gradients are in Python, the same with the dispatcher in C++ as after it."""
    x = make_inputs((1, 3, 5, 2, 8, 4, 4, 4))
    first, *others = {
        "expanded_attention": (x.q, x.latent, x.k_rope, x.w_uk, x.w_uv, None, None, x.scale, 2),
        "latent_attention": (*x.absorbed, None, None, x.scale),
        "per_head_matmul": (x.q[..., :4], x.w_uk),
    }[op]
    gradients = []
    for over in (False, True):
        if over:
            withdraw()
        with torch.enable_grad():
            results = getattr(torch.ops.mla, op)(leaf := first.clone().requires_grad_(), *others)
            result = results if op == "per_head_matmul" else results[0]
            assert type(result.grad_fn).__name__ == f"GeneratedBackwardFor_mla_{op}_defaultBackward"
            gradients += torch.autograd.grad(result.square().sum(), leaf)
    assert gradients[0].any()
    assert torch.equal(*gradients)


WITHOUT_A_COMPILER = """
import torch
import mla_compile.kernels.register
from mla_compile.kernels import compiled, dispatcher
compiled.begin([torch.float32])
compiled.make_ready([torch.float32])
assert dispatcher.take_over() is None
x, weight = torch.randn(1, 1, 3, 4), torch.randn(3, 4, 5)
torch.testing.assert_close(torch.ops.mla.per_head_matmul(x, weight), torch.einsum("bsni,nio->bsno", x, weight))
"""


def test_without_a_compiler_python_goes_on_and_says_so(tmp_path):
    environment = os.environ | {"CXX": str(tmp_path / "no compiler"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_VEC_ISA_OK", None)
    run = subprocess.run([sys.executable, "-c", WITHOUT_A_COMPILER], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("C++ kernels could not be compiled") == 1
    assert "operations (InvalidCxxCompiler: No working C++ compiler found" in run.stderr


def test_a_compiler_that_is_missing_is_named_once(tmp_path, caplog):
    native._WARNED.clear()
    with caplog.at_level(logging.WARNING, logger="mla_compile"):
        for name in ("one.cpp", "other.cpp"):
            source = tmp_path / name
            source.write_text("this is not C++")
            assert native.load((source,), ("float*",)) is None
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "C++ kernels could not be compiled" in record.getMessage()
    assert "(CppCompileError: C++ compile error)" in record.getMessage()
