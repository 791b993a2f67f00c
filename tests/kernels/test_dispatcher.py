"""Ops that torch's dispatcher calls in C++: what runs there, and what goes on to Python."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from mla_compile.kernels import dispatcher, native
from mla_compile.kernels.latent_attention import latent_attention_reference
from mla_compile.kernels.latent_attention import native as latent_native
from mla_compile.kernels.per_head_matmul import native as matmul_native
from mla_compile.kernels.per_head_matmul import per_head_matmul_reference

from .errors import assert_as_close_as
from .naive import make_inputs, masks

SIZES = {
    "decode": (1, 1, 67, 8, 48, 24, 16, 24),
    "sequences and queries": (3, 4, 130, 5, 33, 8, 7, 8),
    "no keys": (2, 1, 0, 4, 16, 8, 8, 8),
}
IN_CPP = (
    "none",
    "causal",
    "causal, first queries see nothing",
    "causal, last keys unseen",
    "right padding",
    "left padding and causal",
    "all hidden",
)
"""Masks of one row a sequence that hide keys before and after a range."""


@pytest.fixture
def no_python(monkeypatch, dispatched):
    """The general implementations are not called."""

    def called(*arguments):
        raise AssertionError("the general implementation was called")

    monkeypatch.setattr(latent_native, "_cached", called)
    monkeypatch.setattr(matmul_native, "_suits", called)


def absorbed(x):
    q_nope, q_rope = x.q.split([x.w_uk.shape[1], x.q.shape[3] - x.w_uk.shape[1]], dim=-1)
    return torch.einsum("bsnp,npl->bsnl", q_nope, x.w_uk), q_rope, x.latent, x.k_rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mask", IN_CPP)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_decode_step_runs_no_python(no_python, sizes, mask, threads, dtype):
    torch.set_num_threads(threads)
    x = make_inputs(sizes, dtype)
    case = masks(sizes[0], sizes[3], sizes[1], sizes[2])[mask]
    o, lse = torch.ops.mla.latent_attention(*absorbed(x), *case, x.scale)
    exact = latent_attention_reference(*(t.double() for t in absorbed(x)), *case, x.scale)
    measure = latent_attention_reference(*absorbed(x), *case, x.scale)
    assert (o.shape, lse.dtype, o.is_contiguous()) == (measure[0].shape, torch.float32, True)
    if sizes[2]:
        assert_as_close_as(measure[0], o, exact[0])
        assert_as_close_as(measure[1].float(), lse, exact[1])
    else:
        assert (o == 0).all()
        assert (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 4])
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
        actual, _ = torch.ops.mla.latent_attention(*absorbed(x), None, None, x.scale)
        expected, _ = latent_attention_reference(*absorbed(x), None, None, x.scale)
    else:
        actual = torch.ops.mla.per_head_matmul(x.q[..., :24], x.w_uk)
        expected = per_head_matmul_reference(x.q[..., :24], x.w_uk)
    torch.testing.assert_close(actual, expected)


def test_a_kernel_that_is_taken_back_is_not_called(no_python):
    dispatcher.provide("per_head_matmul", (torch.float32,), None)
    with pytest.raises(AssertionError, match="the general implementation was called"):
        torch.ops.mla.per_head_matmul(torch.randn(1, 1, 3, 4), torch.randn(3, 4, 5))


def test_gradients_are_refused_when_they_are_asked_for(dispatched):
    x, weight = torch.randn(1, 1, 3, 4, requires_grad=True), torch.randn(3, 4, 5)
    with torch.enable_grad():
        total = torch.ops.mla.per_head_matmul(x, weight).sum()
    with pytest.raises(NotImplementedError, match="mla::per_head_matmul has no backward: expected inputs that need no"):
        total.backward()


def test_gradients_of_what_has_them_stay(dispatched):
    x = make_inputs((1, 3, 5, 2, 8, 4, 4, 4))
    with torch.enable_grad():
        latent = x.latent.clone().requires_grad_()
        o, _ = torch.ops.mla.expanded_attention(x.q, latent, x.k_rope, x.w_uk, x.w_uv, None, None, x.scale, 2)
        o.sum().backward()
    assert latent.grad is not None


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
    run = subprocess.run([sys.executable, "-c", WITHOUT_A_COMPILER], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("C++ kernels could not be compiled") == 1


def test_a_compiler_that_is_missing_is_named_once(tmp_path, caplog):
    native._say_that_there_are_none.cache_clear()
    with caplog.at_level(logging.WARNING, logger="mla_compile"):
        for name in ("one.cpp", "other.cpp"):
            source = tmp_path / name
            source.write_text("this is not C++")
            assert native.load((source,), ("float*",)) is None
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "C++ kernels could not be compiled" in record.getMessage()
