"""Compiled functions run in other processes: saved by `aot_compile`, or among torch's cache artifacts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_compile
from tests.errors import assert_as_close_as_eager

B, N, P, V, L, T = 2, 4, 8, 6, 20, 40


def attend(q: Tensor, latent: Tensor, w: Tensor) -> Tensor:
    """Naive MLA: q `[B, N, S, P]`, latent `[B, T, L]`, w `[N * (P + V), L]`."""
    k, v = F.linear(latent, w).unflatten(-1, (N, P + V)).transpose(1, 2).split([P, V], -1)
    return F.scaled_dot_product_attention(q, k, v)


LOADS = """
import sys, torch
function, inputs, result = sys.argv[1:]
with open(function, "rb") as file:
    loaded = torch.compiler.load_compiled_function(file)
assert "mla_compile.backend" not in sys.modules
inputs = torch.load(inputs)
trained = any(tensor.requires_grad for tensor in inputs)
with torch.set_grad_enabled(trained):
    o = loaded(*inputs)
grads = torch.autograd.grad(o.square().sum(), inputs) if trained else ()
torch.save([o.detach(), *grads], result)
"""


CODE = """
import torch.nn.functional as F
def attend(q, latent, w):
    k, v = F.linear(latent, w).unflatten(-1, (4, 14)).transpose(1, 2).split([8, 6], -1)
    return F.scaled_dot_product_attention(q, k, v)
"""
PRECOMPILED = """
import sys, torch, torch._dynamo.package
folder, backend, stance, trained = sys.argv[1:]
sys.path.insert(0, folder)
from code_of_a_user import attend
artifacts, inputs, result = f"{folder}/artifacts", f"{folder}/inputs", f"{folder}/{backend}"
torch._dynamo.config.caching_precompile = True
torch._dynamo.package.DynamoCache.clear()  # what earlier runs left on this machine
if stance != "default":
    with open(artifacts, "rb") as file:
        torch.compiler.load_cache_artifacts(file.read())
inputs = torch.load(inputs)
with torch.set_grad_enabled(trained == "True"), torch.compiler.set_stance(stance):
    o = torch.compile(attend, backend=backend)(*inputs)
    grads = torch.autograd.grad(o.square().sum(), inputs) if trained == "True" else ()
torch.save([o.detach(), *grads], result)
assert ("mla_compile.backend" in sys.modules) == (backend == "mla")
if stance == "default":
    with open(artifacts, "wb") as file:
        file.write(torch.compiler.save_cache_artifacts()[0])
"""


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="torch 2.11 saves nothing but its own backends'")
@pytest.mark.parametrize("trained", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["inference", "trained"])
def test_it_runs_in_another_process(trained: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = (B, N, 3, P), (B, T, L), (N * (P + V), L)
    inputs = [torch.randn(size).div(size[-1] ** 0.5).requires_grad_(trained) for size in sizes]
    with torch.set_grad_enabled(trained):
        compiled = torch.compile(attend, backend="mla", fullgraph=True).aot_compile((tuple(inputs), {}))
    assert mla_compile.last_report().rewritten == 1
    function, given, result = (str(tmp_path / name) for name in ("function", "inputs", "result"))
    compiled.save_compiled_function(function)
    torch.save(inputs, given)
    done = subprocess.run([sys.executable, "-c", LOADS, function, given, result], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    eager = results(attend, inputs)
    exact = results(attend, [tensor.detach().double().requires_grad_(trained) for tensor in inputs])
    for got, near, right in zip(torch.load(result), eager, exact, strict=True):
        assert_as_close_as_eager(got, near, right)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True], ids=["inference", "trained"])
def test_nothing_is_compiled_again_with_precompile_artifacts(trained: bool, tmp_path: Path) -> None:
    """torch finds them by the function alone: under another backend, which does not import this library, too."""
    torch.manual_seed(0)
    sizes = (B, N, 3, P), (B, T, L), (N * (P + V), L)
    inputs = [torch.randn(size, dtype=torch.float64, requires_grad=trained) for size in sizes]
    torch.save(inputs, tmp_path / "inputs")
    (tmp_path / "code_of_a_user.py").write_text(CODE)
    for backend, stance in (("mla", "default"), ("inductor", "fail_on_recompile")):
        command = [sys.executable, "-c", PRECOMPILED, str(tmp_path), backend, stance, str(trained)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        torch.testing.assert_close(torch.load(tmp_path / backend), results(attend, inputs))


def results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of the inputs that need them."""
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    with torch.set_grad_enabled(bool(trained)):
        o = function(*inputs)
        return [o.detach(), *(torch.autograd.grad(o.square().sum(), trained) if trained else ())]
