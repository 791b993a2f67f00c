"""What is asked for by `mla.kernels` and `mode="max-autotune"` reaches what autograd computes later, maybe in another
thread: gradients, and forwards of checkpoints again."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mla_compile
from mla_compile.asked import asked, kept_to, told
from mla_compile.inductor import codegen
from mla_compile.kernels._common.tuning import tuning


class Heard(TorchDispatchMode):
    """Records what each backward of this project's attention is told, and each forward."""

    def __init__(self):
        super().__init__()
        self.by_backwards, self.by_forwards = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mla.expanded_attention_backward.default:
            self.by_backwards.append(kwargs or {})
        if func is torch.ops.mla.expanded_attention.default:
            self.by_forwards.append(kwargs or {})
        return func(*args, **kwargs or {})


def of_gradients(make):
    """What gradients are told in the backward of what `make` returns, run in a thread of its own."""
    return heard_in_backward(make).by_backwards


def heard_in_backward(make):
    """What is heard in that backward."""
    heard = Heard()

    def differentiate():
        with heard:
            result.sum().backward()

    with torch.enable_grad():
        result = make()
        thread = threading.Thread(target=differentiate)
        thread.start()
        thread.join()
    return heard


def inputs():
    weight = torch.randn(16, 64, requires_grad=True)
    return torch.randn(1, 4, 5, 12), torch.randn(1, 5, 16), torch.randn(1, 5, 4), weight


def mla(q, latent, k_rope, w):
    """q `[1, N, Sq, P + R]`, latent `[1, T, L]`, k_rope `[1, T, R]`, w `[L, N (P + V)]`."""
    k_nope, v = (latent @ w).view(1, -1, 4, 16).transpose(1, 2).split([8, 8], -1)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, 4, -1, -1)], -1)
    return (q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v


ASKED = [("auto", {}), ("triton", {"kernels": "triton"})]
OPTIONS = [({"mla.kernels": kernels}, heard) for kernels, heard in ASKED]
OPTIONS += [({"max_autotune": True}, {"measure": True})]
OPTIONS += [({"mla.kernels": "triton", "max_autotune": True}, {"kernels": "triton", "measure": True})]


@pytest.mark.parametrize(("kernels", "heard"), ASKED)
def test_by_autograd(kernels, heard):
    def make():
        q, latent, k_rope, w = inputs()
        w_uk, w_uv = w.T.view(4, 16, 16).split([8, 8], 1)
        with kept_to(kernels):
            return torch.ops.mla.expanded_attention(q.transpose(1, 2), latent, k_rope, w_uk, w_uv, None, 0, 0.3, 16)[0]

    assert of_gradients(make) == [heard]
    assert asked() == "auto"


def test_by_autograd_while_tuning():
    def make():
        q, latent, k_rope, w = inputs()
        w_uk, w_uv = w.T.view(4, 16, 16).split([8, 8], 1)
        with tuning():
            return torch.ops.mla.expanded_attention(q.transpose(1, 2), latent, k_rope, w_uk, w_uv, None, 0, 0.3, 16)[0]

    assert of_gradients(make) == [{"measure": True}]
    assert told() == {}


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(("options", "heard"), OPTIONS, ids=str)
def test_in_compiled_training(options, heard):
    compiled = torch.compile(mla, backend="mla", options=options)
    assert of_gradients(lambda: compiled(*inputs())) == [heard]
    assert [site.path for site in mla_compile.last_report().sites] == ["chunked"]


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(("options", "heard"), OPTIONS, ids=str)
def test_in_a_checkpoint_a_forward_is_told_again(options, heard):
    def checkpointed(*given):
        return checkpoint(mla, *given, use_reentrant=False)

    compiled = torch.compile(checkpointed, backend="mla", options=options)
    again = heard_in_backward(lambda: compiled(*inputs()))
    assert (again.by_forwards, again.by_backwards) == ([heard], [heard])
    assert [site.path for site in mla_compile.last_report().sites] == ["chunked"]


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("kernels", [kernels for kernels, _ in ASKED])
def test_in_a_checkpoint_around_a_compiled_function_it_is_asked_for_again(monkeypatch, kernels):
    by_forwards, inner = [], codegen.compile_fx_inner

    def listening(*arguments, is_backward=False, **named):
        compiled = inner(*arguments, is_backward=is_backward, **named)

        def call(given):
            if not is_backward:
                by_forwards.append((threading.current_thread() is threading.main_thread(), asked()))
            return compiled(given)

        call._boxed_call = True
        return call

    monkeypatch.setattr(codegen, "compile_fx_inner", listening)
    compiled = torch.compile(mla, backend="mla", options={"mla.kernels": kernels})
    with torch.enable_grad():
        result = checkpoint(compiled, *inputs(), use_reentrant=False)
    thread = threading.Thread(target=lambda: result.sum().backward())
    thread.start()
    thread.join()
    assert by_forwards == [(True, kernels), (False, kernels)]


def test_what_a_forward_is_told_counts_more_than_what_is_asked_for():
    def make():
        q, latent, k_rope, w = inputs()
        w_uk, w_uv = w.T.view(4, 16, 16).split([8, 8], 1)
        given = q.transpose(1, 2), latent, k_rope, w_uk, w_uv, None, 0, 0.3, 16
        with kept_to("gluon"):
            return torch.ops.mla.expanded_attention(*given, kernels="triton")[0]

    assert of_gradients(make) == [{"kernels": "triton"}]


def test_a_graph_that_stays_as_it_is_is_kept_for_each_value(tmp_path, monkeypatch):
    """torch keeps the gradients of an op that the user calls, with what was asked for, under another key."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def called(q, latent, k_rope, w):
        w_uk, w_uv = w.T.view(4, 16, 16).split([8, 8], 1)
        return torch.ops.mla.expanded_attention(q.transpose(1, 2), latent, k_rope, w_uk, w_uv, None, 0, 0.3, 16)[0]

    def heard(options):
        torch._dynamo.reset()
        compiled = torch.compile(called, backend="mla", options=options)
        return of_gradients(lambda: compiled(*inputs()))

    for options, said in (*OPTIONS, *OPTIONS):
        assert heard(options) == [said]
