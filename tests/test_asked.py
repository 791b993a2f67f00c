"""What is asked for by `mla.kernels` reaches gradients, which autograd computes later and maybe in another thread."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mla_compile
from mla_compile.asked import asked, kept_to


class Heard(TorchDispatchMode):
    """Records which kernels each backward of this project's attention is told to take."""

    def __init__(self):
        super().__init__()
        self.kernels = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mla.expanded_attention_backward.default:
            self.kernels.append((kwargs or {}).get("kernels"))
        return func(*args, **kwargs or {})


def of_gradients(make):
    """The kernels that are asked for in the backward of what `make` returns, run in a thread of its own."""
    heard = Heard()

    def differentiate():
        with heard:
            result.sum().backward()

    with torch.enable_grad():
        result = make()
        thread = threading.Thread(target=differentiate)
        thread.start()
        thread.join()
    return heard.kernels


def inputs():
    weight = torch.randn(16, 64, requires_grad=True)
    return torch.randn(1, 4, 5, 12), torch.randn(1, 5, 16), torch.randn(1, 5, 4), weight


def mla(q, latent, k_rope, w):
    """q `[1, N, Sq, P + R]`, latent `[1, T, L]`, k_rope `[1, T, R]`, w `[L, N (P + V)]`."""
    k_nope, v = (latent @ w).view(1, -1, 4, 16).transpose(1, 2).split([8, 8], -1)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, 4, -1, -1)], -1)
    return (q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v


ASKED = [("auto", None), ("triton", "triton")]


@pytest.mark.parametrize(("kernels", "heard"), ASKED)
def test_by_autograd(kernels, heard):
    def make():
        q, latent, k_rope, w = inputs()
        w_uk, w_uv = w.T.view(4, 16, 16).split([8, 8], 1)
        with kept_to(kernels):
            return torch.ops.mla.expanded_attention(q.transpose(1, 2), latent, k_rope, w_uk, w_uv, None, 0, 0.3, 16)[0]

    assert of_gradients(make) == [heard]
    assert asked() == "auto"


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(("kernels", "heard"), ASKED)
def test_in_compiled_training(kernels, heard):
    compiled = torch.compile(mla, backend="mla", options={"mla.kernels": kernels})
    assert of_gradients(lambda: compiled(*inputs())) == [heard]
    assert [site.path for site in mla_compile.last_report().sites] == ["chunked"]


def test_a_graph_that_stays_as_it_is_is_kept_for_each_value(tmp_path, monkeypatch):
    """torch keeps the gradients of an op that the user calls, with what was asked for, under another key."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def called(q, latent, k_rope, w):
        w_uk, w_uv = w.T.view(4, 16, 16).split([8, 8], 1)
        return torch.ops.mla.expanded_attention(q.transpose(1, 2), latent, k_rope, w_uk, w_uv, None, 0, 0.3, 16)[0]

    def heard(kernels):
        torch._dynamo.reset()
        compiled = torch.compile(called, backend="mla", options={"mla.kernels": kernels})
        return of_gradients(lambda: compiled(*inputs()))

    assert [heard(kernels) for kernels in ("triton", "auto", "triton")] == [["triton"], [None], ["triton"]]
