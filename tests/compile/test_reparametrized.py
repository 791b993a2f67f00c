"""Weights that are functions of others, passed in from outside, shared by two layers, or quantised by torch.ao."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import mla_compile
from examples.plain_mla import NaiveMLA

TOKENS = 20


class Halves(nn.Module):
    def forward(self, weight):
        return weight * 0.25 + weight * 0.5


def layer():
    return NaiveMLA(hidden=64, N=4, L=16, P=8, R=4, V=8).eval()


def parametrized():
    module = layer()
    parametrize.register_parametrization(module.kv_b_proj, "weight", Halves())
    return module


def normed():
    module = layer()
    parametrizations.weight_norm(module.kv_b_proj)
    return module


def spectral():
    module = layer()
    parametrizations.spectral_norm(module.kv_b_proj)
    return module.eval()


class Called(nn.Module):
    """A layer with weights that are not its own."""

    def __init__(self):
        super().__init__()
        self.layer = layer()
        self.others = nn.ParameterDict({name.replace(".", "/"): p * 1.1 for name, p in self.layer.named_parameters()})

    def forward(self, x, past):
        weights = {name.replace("/", "."): p for name, p in self.others.items()}
        return torch.func.functional_call(self.layer, weights, (x, past))


class Tied(nn.Module):
    """Two layers with one up-projection."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layer(), layer()
        self.second.kv_b_proj.weight = self.first.kv_b_proj.weight

    def forward(self, x, past):
        return self.second(x + self.first(x, past)[0], past)


def inputs():
    return torch.randn(1, 1, 64), (torch.randn(1, TOKENS, 16), torch.randn(1, TOKENS, 4))


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("made", [parametrized, normed, spectral, Called, Tied])
def test_weights_are_rewritten_whatever_they_are_made_of(made):
    module, (x, past) = made(), inputs()
    exact, _ = copy.deepcopy(module).double()(x.double(), tuple(t.double() for t in past))
    o, _ = torch.compile(module, backend="mla")(x, past)
    torch.testing.assert_close(o.double(), exact, rtol=1e-4, atol=1e-5)
    assert all(site.rewritten for site in mla_compile.last_report().sites)
    assert mla_compile.last_report().rewritten == (2 if made is Tied else 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("without_codegen")
def test_a_product_in_dynamic_int8_breaks_the_graph_and_the_report_says_so():
    module, given = torch.ao.quantization.quantize_dynamic(layer(), {nn.Linear}, dtype=torch.qint8), inputs()
    expected, _ = module(*given)
    o, _ = torch.compile(module, backend="mla")(*given)
    torch.testing.assert_close(o, expected)
    (site,) = [site for report in mla_compile.reports() for site in report.sites]
    assert not site.rewritten
    assert "found `arg" in site.reason
    assert "modules of torch.ao.quantization and accelerate's hooks break graphs" in site.remedy
