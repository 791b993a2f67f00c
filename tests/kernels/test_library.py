"""The library of the ops in C++: in a process without `mla_compile`, and with it, imported before or after."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._inductor import config

import mla_compile
from mla_compile import ops
from mla_compile.fp8 import RowLayout
from mla_compile.kernels import objects
from mla_compile.kernels.decompositions import decompositions
from mla_compile.kernels.expanded_attention import expanded_attention_reference
from mla_compile.kernels.grow_cache import grow_cache_reference
from mla_compile.kernels.latent_attention import latent_attention_reference
from mla_compile.kernels.library import OPS
from mla_compile.kernels.paged_expanded_attention import paged_expanded_attention_reference
from mla_compile.kernels.paged_latent_attention import paged_latent_attention_reference
from mla_compile.kernels.per_head_matmul import per_head_matmul_reference
from mla_compile.kernels.sparse_latent_attention import sparse_latent_attention_reference
from mla_compile.kernels.widened_matmul import widened_matmul_reference

from .errors import assert_as_close_as
from .naive import make_inputs
from .paged import make_paged, make_paged_heads

WITHOUT_PYTHON = """
import sys
import torch
torch.ops.load_library(sys.argv[1])
schemas, tags = {}, {}
for op in torch.load(sys.argv[2]):
    schemas[op] = str(getattr(torch.ops.mla, op).default._schema)
    tags[op] = sorted(tag.name for tag in getattr(torch.ops.mla, op).default.tags)
results = []
for op, arguments in torch.load(sys.argv[3]):
    try:
        results.append(getattr(torch.ops.mla, op)(*arguments))
    except RuntimeError as error:
        results.append(str(error))
    if results[-1] is None:  # what it was asked for is in place
        results[-1] = arguments
torch.save((schemas, tags, results), sys.argv[4])
assert not any(name.startswith("mla_compile") for name in sys.modules)
"""

IMPORTED_AFTER = """
import sys, warnings
import torch
warnings.simplefilter("error")
torch.ops.load_library(sys.argv[1])
import mla_compile.kernels.register
from mla_compile.kernels import compiled, dispatcher
compiled.begin([torch.float32])
compiled.make_ready([torch.float32])
assert dispatcher.take_over() is None
for dtype in (torch.float32, torch.float64):  # of one it has kernels, of the other it has none
    x, weight = torch.randn(1, 9, 3, 4, dtype=dtype), torch.randn(3, 4, 5, dtype=dtype)
    out = torch.ops.mla.per_head_matmul(x, weight)
    torch.testing.assert_close(out, torch.einsum("bsni,nio->bsno", x, weight))
try:
    torch.ops.mla.per_head_matmul(x, weight[:2])
except mla_compile.KernelError:
    pass
else:
    raise AssertionError("wrong arguments were taken")
"""

IMPORTED_BEFORE = """
import sys
import torch
import mla_compile.kernels.register
from mla_compile.kernels import compiled, dispatcher
x, weight = torch.randn(1, 1, 3, 4, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
before = torch.ops.mla.per_head_matmul(x, weight)
if sys.argv[2] == "taken over":
    compiled.make_ready([torch.float32])
torch.ops.load_library(sys.argv[1])
assert torch.equal(torch.ops.mla.per_head_matmul(x, weight), before)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("library") / "libmla.so"
    with config.patch({"aot_inductor.debug_compile": True}):  # not optimised, which would take most of the time
        mla_compile.build_library(path, [torch.float32])
    return path


def run(text: str, *arguments: object) -> None:
    """Run code in a new process, which must print no errors, except that a torch for CUDA finds no GPU."""
    command = [sys.executable, "-c", text, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    said = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert (done.returncode, said) == (0, [])


def test_every_op_runs_without_python(library, tmp_path):
    """Also for more rows than Python hands to a kernel, and for keys with strides that no kernel reads."""
    x = make_inputs((2, 3, 40, 4, 33, 8, 7, 8))
    few, many = x.absorbed, make_inputs((1, 80, 90, 5, 16, 8, 4, 8)).absorbed
    spread = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in few[2:]]
    indices = torch.rand(2, 3, 40).topk(12).indices
    hiding, adding = torch.rand(2, 1, 3, 40) < 0.7, torch.randn(1, 4, 3, 1, dtype=torch.bfloat16)
    paged, of_heads = make_paged([70, 5, 33], (3, 5, 33, 7), 7), make_paged_heads([81, 40], (9, 3, 11, 7, 5, 9), 8)
    hiding_of_paged = torch.rand(3, 1, 3, 70) < 0.7
    between = torch.zeros(len(paged.pool), 9, paged.pool.shape[2])[:, 1:8]
    paged_apart = replace(paged, pool=between.copy_(paged.pool.nan_to_num()))
    expanded = x.q, x.latent, x.k_rope, x.w_uk, x.w_uv, None, 20, x.scale, 16
    reference = {
        "latent_attention": latent_attention_reference,
        "sparse_latent_attention": sparse_latent_attention_reference,
        "paged_latent_attention": paged_latent_attention_reference,
        "expanded_attention": expanded_attention_reference,
        "paged_expanded_attention": paged_expanded_attention_reference,
        "per_head_matmul": per_head_matmul_reference,
        "widened_matmul": widened_matmul_reference,
        "grow_cache": grow_cache_reference,
    }
    calls = [
        ("latent_attention", (*few, None, 37, 0.2)),
        ("latent_attention", (*many, None, 10, 0.2)),
        ("latent_attention", (*many, None, None, 0.2)),
        ("latent_attention", (*few, hiding, 37, 0.2)),
        ("latent_attention", (*few, adding, None, 0.2)),
        ("latent_attention", (*few[:2], *spread, None, None, 0.2)),
        ("sparse_latent_attention", (*few, indices, hiding, 37, 0.2, False)),
        ("sparse_latent_attention", (*few[:2], *spread, indices, None, None, 0.2, False)),
        ("paged_latent_attention", (*paged.arguments, True, paged.scale)),
        ("paged_latent_attention", (*paged.arguments, True, paged.scale, None, None, hiding_of_paged)),
        ("paged_latent_attention", (*paged_apart.arguments, True, paged.scale, None, None, hiding_of_paged)),
        ("expanded_attention", expanded),
        ("paged_expanded_attention", (*of_heads.arguments, True, of_heads.scale, 20)),
        ("per_head_matmul", (x.q[..., :8], x.w_uk)),
        ("per_head_matmul", (x.q[:, :2, :, :8], x.w_uk.transpose(1, 2).contiguous().transpose(1, 2))),
        ("widened_matmul", (x.latent[0, :5], x.w_uk[0].t())),
        ("widened_matmul", (x.latent[0], x.w_uk.mT, torch.tensor([1, 1, 3, 40]))),
        ("widened_matmul", (x.q[0, 0, :, :8], x.w_uk[0])),
        ("grow_cache", (torch.randn(1, 600, 512), torch.randn(1, 2, 512), 1)),
    ]
    o, lse = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4)
    rows = torch.zeros(2, 3, RowLayout(8, 4, torch.float32).row_bytes, dtype=torch.uint8)
    others = [
        ("merge_states", (o, lse, o.flip(0), lse.flip(0))),
        ("append_latents", (torch.randn(3, 8), torch.randn(3, 4), torch.tensor([4, -1, 0]), rows)),
        ("expanded_attention", (*expanded[:5], torch.ones(1, 1, 3, 40, dtype=torch.bool), *expanded[6:])),
    ]
    schemas = {op: str(getattr(torch.ops.mla, op).default._schema) for op in OPS}
    files = [tmp_path / name for name in ("schemas", "calls", "results")]
    torch.save(schemas, files[0])
    torch.save(calls + others, files[1])
    run(WITHOUT_PYTHON, library, *files)
    found, tags, results = torch.load(files[2])
    assert found == schemas
    assert tags == {op: sorted(tag.name for tag in getattr(torch.ops.mla, op).default.tags) for op in OPS}
    for (op, arguments), result in zip(calls, results, strict=False):
        exact = reference[op](*(t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in arguments))
        measure = reference[op](*arguments)
        pairs = zip(*((r,) if torch.is_tensor(r) else r for r in (measure, result, exact)), strict=True)
        for expected, actual, right in pairs:
            assert_as_close_as(expected, actual, right, merges=5)
    merged, appended, refused = results[len(calls) :]
    for actual, expected in zip(merged, torch.ops.mla.merge_states(*others[0][1]), strict=True):
        assert torch.equal(actual, expected)
    torch.ops.mla.append_latents(*others[1][1])
    assert torch.equal(appended[3], rows)
    assert "expected arguments that a kernel in C++ takes, or mla_compile imported; found neither" in refused


def test_it_has_every_op_that_a_program_may_keep():
    assert {*OPS, "sealed_attention", "expanded_attention_backward", "latent_attention_backward"} == set(ops.__all__)
    assert {op._schema.name.removeprefix("mla::") for op in decompositions()} == {*OPS} - {"append_latents"}


def test_mla_compile_imported_after_it(library):
    run(IMPORTED_AFTER, library)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["imported", "taken over"])
def test_mla_compile_imported_before_it(library, state):
    run(IMPORTED_BEFORE, library, state)


def test_objects_are_compiled_under_the_settings_of_the_caller(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(objects, "compile_object", lambda name, *_: seen.append(config.cpp.simdlen) or name)
    monkeypatch.setattr(objects, "link", lambda *_: None)
    with config.patch({"cpp.simdlen": 256}):
        mla_compile.build_library(tmp_path / "libmla.so")
    assert set(seen) == {256}


@pytest.mark.parametrize("dtypes", [[], [torch.float64], [torch.float8_e4m3fn]], ids=str)
def test_dtypes_that_have_no_kernel(tmp_path, dtypes):
    expected = "expected dtypes among torch.float32, .* wider than a byte, found"
    with pytest.raises(mla_compile.OptionError, match=expected):
        mla_compile.build_library(tmp_path / "libmla.so", dtypes)


@pytest.mark.slow
def test_of_half_precision_and_fp8(tmp_path):
    library, files = tmp_path / "libmla.so", [tmp_path / name for name in ("schemas", "calls", "results")]
    mla_compile.build_library(library, [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
    calls = []
    for dtype in (torch.bfloat16, torch.float16):
        for groups, rope_too in ((3, False), (1, True)):
            x = make_paged_heads([70, 5, 33], (3, 5, 33, 7, 5, 8), 7, dtype, groups=groups, rope_too=rope_too)
            q = torch.randn(3, 3, 5, 38).to(dtype)
            calls.append(("paged_latent_attention", (q[..., :33], q[..., 33:], *x.cache, True, 0.2, x.scales)))
            calls.append(("paged_expanded_attention", (*x.arguments, True, x.scale, 20, x.scales)))
    # Latents and scales are views of one storage in several dtypes, which torch cannot save.
    calls = [(op, [t.clone() if torch.is_tensor(t) else t for t in arguments]) for op, arguments in calls]
    torch.save([], files[0])
    torch.save(calls, files[1])
    run(WITHOUT_PYTHON, library, *files)
    for (op, arguments), results in zip(calls, torch.load(files[2])[2], strict=True):
        for actual, expected in zip(results, getattr(torch.ops.mla, op)(*arguments), strict=True):
            assert torch.equal(actual, expected)
