"""A function that `aot_compile` compiled is saved, and runs in a process that knows nothing of this library."""

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


def results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of the inputs that need them."""
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    with torch.set_grad_enabled(bool(trained)):
        o = function(*inputs)
        return [o.detach(), *(torch.autograd.grad(o.square().sum(), trained) if trained else ())]
