"""A bug in the passes: the model runs as stock Inductor compiles it, with a warning and a note in the report."""

import pytest
import torch

import mla_compile
from mla_compile import rewriting
from mla_compile.training import capture
from tests.compile.layers import Layer, hidden
from tests.compile.test_backend import decode_inputs
from tests.models import Combined

pytestmark = pytest.mark.usefixtures("without_codegen")
WARNING = "KeyError: 'missing'. The graph is left to stock Inductor"
NOTE = "stock Inductor, the passes failed on the graph"


@pytest.fixture(autouse=True)
def failing(monkeypatch):
    """The passes fail once they have changed the graph."""

    def fail(self, module):
        for node in list(module.graph.nodes):
            node.meta.clear()
        return {}["missing"]

    monkeypatch.setattr(rewriting.Pipeline, "__call__", fail)


def test_the_model_runs_and_a_warning_says_why():
    module, (x, cache) = Combined(), decode_inputs()
    compiled = torch.compile(module, backend="mla")
    with pytest.warns(UserWarning, match=WARNING):
        output, _ = compiled(x, cache)
    torch.testing.assert_close(output, module(x, cache)[0])
    assert mla_compile.last_report().note == NOTE
    assert mla_compile.last_report().sites == ()


def test_it_is_tried_again_in_another_process_or_with_a_repaired_version(monkeypatch):
    """No report of it is stored."""
    module, (x, cache) = Combined(), decode_inputs()
    with pytest.warns(UserWarning, match=WARNING):
        torch.compile(module, backend="mla")(x, cache)
    monkeypatch.undo()
    torch._dynamo.reset()
    torch.compile(module, backend="mla")(x, cache)
    assert mla_compile.last_report().rewritten == 1


def test_a_model_that_is_trained():
    module, x = Layer(), hidden()
    with torch.enable_grad():
        with pytest.warns(UserWarning, match=WARNING):
            output = torch.compile(module, backend="mla")(x)
        output.sum().backward()
    torch.testing.assert_close(output, module(x))
    assert module.mla.kv_b_proj.weight.grad.count_nonzero()
    assert mla_compile.last_report().note == NOTE


def test_before_the_passes_of_a_model_that_is_trained(monkeypatch):
    monkeypatch.setattr(capture, "FunctionalTensor", None)  # which every node is compared with
    module = Layer()
    with torch.enable_grad(), pytest.warns(UserWarning, match="TypeError: isinstance"):
        torch.compile(module, backend="mla")(hidden()).sum().backward()
    assert mla_compile.last_report().note == NOTE


def test_explain():
    with pytest.warns(UserWarning, match=WARNING):
        report = mla_compile.explain(Combined(), *decode_inputs())
    assert report.note == NOTE


def test_strict():
    compiled = torch.compile(Combined(), backend="mla", options={"mla.strict": True})
    with pytest.raises(Exception, match="PassesError: the passes failed: KeyError: 'missing'") as caught:
        compiled(*decode_inputs())
    assert isinstance(caught.value.inner_exception, mla_compile.PassesError)


def test_an_exported_program():
    program = torch.export.export(Combined(), decode_inputs())
    with pytest.raises(mla_compile.PassesError, match="KeyError: 'missing'"):
        mla_compile.rewrite(program)
