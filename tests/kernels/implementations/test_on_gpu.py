"""On a GPU, each implementation that is installed and for that GPU agrees with the Triton kernels of this project."""

import dataclasses
import functools
import logging

import pytest
import torch

pytest.importorskip("triton")

from mla_compile.asked import kept_to
from mla_compile.kernels._common.machine import present
from mla_compile.kernels._common.plans import Plans
from mla_compile.kernels.backward.triton import attend_backward_triton
from mla_compile.kernels.expanded_attention.triton import expanded_attention_triton
from mla_compile.kernels.implementations import choose, cudnn, expansions, gradients, named, pages
from mla_compile.kernels.implementations.cudnn import CUDNN
from mla_compile.kernels.implementations.cudnn_backward import CUDNN_BACKWARD
from mla_compile.kernels.implementations.packages import found, is_installed
from mla_compile.kernels.implementations.table import EXPANDED, GRADIENTS, NAMED, PAGED
from mla_compile.kernels.implementations.trial import disagreement
from mla_compile.kernels.paged_latent_attention.triton import paged_latent_attention_triton
from mla_compile.kernels.sparse_latent_attention.triton import sparse_latent_attention_triton

from ..errors import assert_as_close_as
from . import test_choose, test_cudnn, test_cudnn_backward, test_named

CASES = [(PAGED, each, heads) for each in PAGED.implementations for heads in (16, 128)]
CASES += [(NAMED, each, causal) for each in NAMED.implementations for causal in (None, 30)]
CASES += [(EXPANDED, each, offset) for each in EXPANDED.implementations for offset in (None, 0, 30)]


def skip_if_refused(op, each, x, machine):
    why = each.refusal(op.problem_of(x), machine.arch)
    if why is not None:
        pytest.skip(f"{each.name} {why}")


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "each", "which"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_it_agrees_with_ours(op, each, which):
    machine = present(torch.device("cuda", 0))
    if not is_installed(each) or machine.arch not in each.architectures:
        pytest.skip(f"{each.name} is not installed, or not for {machine.arch}")
    if op is PAGED:
        made, small, ours = test_choose.problem(1, which), pages.small, paged_latent_attention_triton
    elif op is NAMED:
        made, small, ours = test_named.problem(causal=which), named.small, sparse_latent_attention_triton
    else:
        made = test_cudnn.problem(9, 60, heads=16, offset=which, workspace_tokens=1024)
        small, ours = expansions.small, expanded_attention_triton
    tensors = {name: value.cuda() for name, value in vars(made).items() if isinstance(value, torch.Tensor)}
    x = small(dataclasses.replace(made, **tensors))
    skip_if_refused(op, each, x, machine)
    way = functools.partial(each.attend, found(each).module)
    assert disagreement(x, way, lambda x: ours(x, machine)) is None


def gradients_on_gpu(offset, dtype=torch.bfloat16, workspace_tokens=1024):
    """A small call of the backward, and the machine; skips where cuDNN does not take it."""
    machine = present(torch.device("cuda", 0))
    sizes = {"heads": 16, "offset": offset, "dtype": dtype, "workspace_tokens": workspace_tokens}
    made = test_cudnn_backward.problem(9, 60, **sizes)
    tensors = {name: value.cuda() for name, value in vars(made).items() if isinstance(value, torch.Tensor)}
    x = dataclasses.replace(made, **tensors)
    skip_if_refused(GRADIENTS, CUDNN_BACKWARD, x, machine)
    return gradients.small(x), machine


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [None, 0, 30])
def test_gradients_agree_with_ours(offset):
    x, machine = gradients_on_gpu(offset)
    way = functools.partial(CUDNN_BACKWARD.attend, torch)
    ours = functools.partial(attend_backward_triton, machine=machine)
    assert disagreement(x, way, ours, GRADIENTS.results_of(x)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("workspace_tokens", [1024, 40], ids=["all heads", "some heads of a sequence"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", [None, 0, 30])
def test_gradients_are_as_close_to_float64_as_ours(monkeypatch, offset, dtype, workspace_tokens):
    monkeypatch.setattr(cudnn, "_PROCESSORS", 0)
    x, machine = gradients_on_gpu(offset, dtype, workspace_tokens)
    on_cpu = {name: value.cpu() for name, value in vars(x).items() if isinstance(value, torch.Tensor)}
    _, _, differentiate = test_cudnn_backward.exact(dataclasses.replace(x, **on_cpu))
    results = CUDNN_BACKWARD.attend(torch, x), attend_backward_triton(x, machine), differentiate(x.grad_o.cpu())
    for theirs, ours, exact in zip(*results, strict=True):
        assert_as_close_as(ours.cpu(), theirs.cpu(), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [300, 512])
@pytest.mark.parametrize("offset", [None, 0, 40])
def test_training_takes_cudnn_on_hopper_unless_kept_to_ours(monkeypatch, caplog, offset, queries):
    machine = present(torch.device("cuda", 0))
    if machine.arch != "sm_90":
        pytest.skip("cuDNN comes first on sm_90")
    monkeypatch.setattr(choose, "CHOICES", Plans())
    monkeypatch.setattr(expansions, "at_least", lambda queries: expansions.MANY)  # small as the problem is
    caplog.set_level(logging.INFO, logger=choose.__name__)
    x = test_cudnn.problem(queries, queries + (offset or 0), heads=16, offset=offset, batch=2, device="cuda")
    direction = torch.randn(2, queries, 16, test_cudnn.V, device="cuda").bfloat16()
    skip_if_refused(EXPANDED, CUDNN, x, machine)
    settings = x.mask, x.causal_offset, x.scale, x.workspace_tokens

    def differentiate(direction, q):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, x.latent, x.k_rope, x.w_uk, x.w_uv)]
            return torch.autograd.grad(torch.ops.mla.expanded_attention(*leaves, *settings)[0], leaves, direction)

    by_cudnn = differentiate(direction, x.q)
    chosen = {message.partition(";")[0] for message in caplog.messages}
    assert chosen == {"mla::expanded_attention: cuDNN", "mla::expanded_attention_backward: cuDNN"}
    with kept_to("triton"):
        by_ours = differentiate(direction, x.q)
    # The same numbers in other strides, for which torch may not take the plan that it made for these.
    by_heads = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (direction, x.q))
    for first, again, ours in zip(by_cudnn, differentiate(*by_heads), by_ours, strict=True):
        for one in (first, again):  # both forward and backward round otherwise
            assert (one.float() - ours.float()).abs().max() <= 2**-5 * ours.float().abs().max()
