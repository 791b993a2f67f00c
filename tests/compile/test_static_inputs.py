"""Inputs with fixed addresses are declared static to Inductor: CUDA graphs need not copy them at each replay."""

import pytest
import torch

from mla_compile.dynamo.graph import copied
from mla_compile.inductor import codegen
from mla_compile.inductor.interpreted import interpreted
from tests.models import HIDDEN, Inference


@pytest.fixture
def static(monkeypatch):
    """For each graph, the shapes of the inputs that are declared static to Inductor."""
    found = []

    def inner(module, inputs, **options):
        indices = options.get("static_input_idxs", ())
        found.append(sorted(tuple(inputs[i].shape) for i in indices))
        return interpreted(module, inputs)

    monkeypatch.setattr(codegen, "compile_fx_inner", inner)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield found


def step(cache):
    model = Inference()
    torch.compile(model, backend="mla", fullgraph=True)(torch.randn(1, 1, HIDDEN), cache | {"start": 5})
    return sorted(tuple(parameter.shape) for parameter in model.parameters())


def test_parameters_stay(static):
    assert static == [step(Inference().empty_cache(1))]


def test_a_cache_stays_if_it_is_marked(static):
    cache = Inference().empty_cache(1)
    tensors = [cache["kv"], cache["pe"]]
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)
    parameters = step(cache)
    assert static == [sorted([*parameters, *(tuple(tensor.shape) for tensor in tensors)])]


def test_a_copy_says_of_its_inputs_what_the_graph_says():
    graphs = []

    def keep(module, inputs):
        graphs.append((module, copied(module)))
        return module

    model = Inference()
    torch.compile(model, backend=keep)(torch.randn(1, 1, HIDDEN), model.empty_cache(1))
    ((module, copy_of_it),) = graphs
    assert copy_of_it._param_name_to_source is module._param_name_to_source
    before, after = (m.graph.find_nodes(op="placeholder") for m in (module, copy_of_it))
    assert [node._dynamo_source for node in after] == [node._dynamo_source for node in before]
