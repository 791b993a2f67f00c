"""The second trace: its nodes say from which nodes of Dynamo's graph they come."""

import pytest
import torch

import mla_compile.backend
from tests.models import HIDDEN, Combined, L, R


@pytest.mark.usefixtures("without_codegen")
def test_nodes_come_from_dynamos(monkeypatch):
    """As in stock Inductor, where comments in generated code, torch.profiler and tlparse name these nodes."""
    written, traced = set(), []
    retrace = mla_compile.attempt.retrace

    def spy(module):
        traced.append(retrace(module))
        return traced[-1]

    def backend(module, inputs):
        written.update(node.name for node in module.graph.nodes)
        return mla_compile.backend.mla(module, inputs)

    monkeypatch.setattr(mla_compile.attempt, "retrace", spy)
    with torch.no_grad():
        cache = torch.randn(1, 40, L), torch.randn(1, 40, R)
        torch.compile(Combined().eval(), backend=backend)(torch.randn(1, 1, HIDDEN), cache)
    (graph,) = (module.graph for module in traced)
    computed = [node for node in graph.nodes if node.op == "call_function"]
    assert torch.ops.mla.latent_attention.default in {node.target for node in computed}
    sources = {node: {source.name for source in node.meta.get("from_node", [])} for node in computed}
    assert all(sources.values())
    assert set().union(*sources.values()) <= written
