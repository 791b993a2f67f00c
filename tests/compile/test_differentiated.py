"""Graphs that say themselves what is differentiated: with `no_grad` inside, or by `torch.func`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mla_compile
from tests.models import HIDDEN, Combined, L, R, Separate

pytestmark = pytest.mark.usefixtures("without_codegen")


def decode_inputs():
    return torch.randn(2, 1, HIDDEN), (torch.randn(2, 40, L), torch.randn(2, 40, R))


def prompt(queries: int = 5):
    return torch.randn(2, queries, HIDDEN), Combined.empty_cache(2)


class Within(nn.Module):
    """A module whose `forward` turns gradients off itself, as in DeepSeek's own inference code."""

    def __init__(self, context) -> None:
        super().__init__()
        self.attention, self.context = Combined(), context

    def forward(self, x, cache):
        with self.context():
            return self.attention(x, cache)


NOT_ON_2_11 = pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="torch 2.11 traces no inference_mode within"
)


@pytest.mark.parametrize("context", [torch.no_grad, pytest.param(torch.inference_mode, marks=NOT_ON_2_11)])
def test_a_step_without_gradients_within_is_absorbed(context):
    module, inputs = Within(context), decode_inputs()
    with torch.enable_grad():
        got, _ = torch.compile(module, backend="mla")(*inputs)
    assert not got.requires_grad
    torch.testing.assert_close(got, module.attention(*inputs)[0])
    assert [site.path for site in mla_compile.last_report().sites] == ["absorbed"]


def test_a_cache_that_has_gradients_written_to_it_is_a_result():
    module = Separate()
    caches = [module.empty_cache(2) for _ in range(2)]
    x = torch.randn(2, 3, HIDDEN)

    def attend(cache):
        return module(x, cache)[0].detach()

    with torch.enable_grad():
        expected, got = attend(caches[0]), torch.compile(attend, backend="mla")(caches[1])
        torch.testing.assert_close(got, expected)
    assert caches[0]["latent"].requires_grad
    assert caches[1]["latent"].requires_grad
    assert [site.path for site in mla_compile.last_report().sites] != ["absorbed"]


def by_grad(loss, x):
    return torch.func.grad(loss)(x)


def by_jvp(loss, x):
    return torch.func.jvp(loss, (x,), (torch.ones_like(x),))


def of_each_sample(loss, x):
    return torch.vmap(torch.func.grad(loss))(x[:, None])


@pytest.mark.diagonal
@pytest.mark.parametrize("differentiated", [by_grad, by_jvp, of_each_sample])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_graph_that_differentiates_itself_is_left_to_inductor(differentiated, enabled):
    module, (x, _) = Combined(), prompt()

    def loss(x):
        return module(x, Combined.empty_cache(x.shape[0]))[0].square().mean()

    with torch.set_grad_enabled(enabled), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        got, expected = torch.compile(differentiated, backend="mla")(loss, x), differentiated(loss, x)
    torch.testing.assert_close(got, expected)
    assert mla_compile.last_report().note == "stock Inductor, the graph computes gradients of its own"


def test_parameters_can_be_swapped_after_compilation():
    """As `load_state_dict` and `.to()` do under `torch.__future__.set_swap_module_params_on_conversion`."""
    module, inputs = Combined(), decode_inputs()
    compiled = torch.compile(module, backend="mla")
    compiled(*inputs)
    torch.utils.swap_tensors(module.kv_b_proj.weight, nn.Parameter(torch.randn_like(module.kv_b_proj.weight)))
    torch.testing.assert_close(compiled(*inputs)[0], module(*inputs)[0])
    assert [report.rewritten for report in mla_compile.reports()] == [1]
