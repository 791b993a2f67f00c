"""The backend as torch sees it: its name, gradients, and graphs without MLA."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.fx_passes import joint_graph

import mla_compile
from mla_compile import attempt
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, Combined, L, R


class Ordinary(nn.Module):
    """Multi-head attention with rope-free keys of full width: nothing to rewrite."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = (t.view(*x.shape[:2], 4, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Broken(nn.Module):
    """Two attentions, each in a graph of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Combined(), Combined()

    def forward(self, x, cache):
        x, _ = self.first(x, cache)
        torch._dynamo.graph_break()
        return self.second(x, cache)


def decode_inputs(tokens=40, dtype=torch.float32, batch=1):
    cache = torch.randn(batch, tokens, L, dtype=dtype), torch.randn(batch, tokens, R, dtype=dtype)
    return torch.randn(batch, 1, HIDDEN, dtype=dtype), cache


def test_torch_finds_the_backend_by_name():
    assert "mla" in torch.compiler.list_backends()


@pytest.mark.usefixtures("without_codegen")
def test_inductor_options_reach_inductor(monkeypatch):
    seen = []
    retrace = attempt.retrace

    def spy(*arguments):
        seen.append(torch._inductor.config.max_autotune)
        return retrace(*arguments)

    monkeypatch.setattr(attempt, "retrace", spy)
    torch.compile(Combined(), backend="mla", mode="max-autotune-no-cudagraphs")(*decode_inputs())
    torch._dynamo.reset()
    torch.compile(Combined(), backend="mla", options={"max_autotune": True})(*decode_inputs())
    assert seen == [True, True]
    assert not torch._inductor.config.max_autotune


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("folds", [True, False])
def test_inductors_own_passes_see_a_rewritten_graph_once_as_they_are_set(monkeypatch, folds):
    seen = []
    monkeypatch.setattr(joint_graph, "constant_fold_uniform_value", seen.append)
    compiled = torch.compile(Combined(), backend="mla", options={"joint_graph_constant_folding": folds})
    compiled(*decode_inputs())
    report = mla_compile.last_report()
    assert (report.rewritten, set(report.seconds)) == (1, {"passes", "retrace", "joint_passes", "compile"})
    assert len(seen) == folds
    for module in seen:
        assert torch.ops.mla.latent_attention.default in {node.target for node in module.graph.nodes}


def test_without_mla_the_generated_code_is_stock_inductors():
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(2, 16, 32)
    module = Ordinary()
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        _, ours = run_and_get_code(torch.compile(module, backend="mla"), x)
        torch._dynamo.reset()
        _, stock = run_and_get_code(torch.compile(module, backend="inductor"), x)

    def body(code):
        return [line for line in code.splitlines() if not line.startswith(("# AOT ID", "# Topologically"))]

    assert [body(code) for code in ours] == [body(code) for code in stock]
    (site,) = mla_compile.last_report().sites
    assert site.path == "unchanged"
    assert mla_compile.last_report().note == "stock Inductor, nothing to rewrite"


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("scale_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_softmax_that_is_written_out_is_found(dtype, scale_first):
    """The passes see the graph before Inductor's joint-graph passes, which would rewrite `exp(a s - max(a s))`."""

    def attention(q, latent, weight):
        k, v = (latent @ weight).unflatten(2, (4, 16)).transpose(1, 2).chunk(2, dim=-1)
        scores = q @ k.mT
        scores = scores * 0.3 if scale_first else scores
        scores = scores - scores.amax(-1, keepdim=True)
        grown = torch.exp(scores if scale_first else scores / 3)
        return grown / grown.sum(-1, keepdim=True) @ v

    inputs = torch.randn(2, 4, 1, 8), torch.randn(2, 40, 16), torch.randn(16, 64) / 4
    given = [t.to(dtype) for t in inputs]
    compiled = torch.compile(attention, backend="mla", fullgraph=True)(*given)
    assert [site.path for site in mla_compile.last_report().sites] == ["absorbed"]
    assert_as_close_as_eager(compiled, attention(*given), attention(*(t.double() for t in given)))


@pytest.mark.usefixtures("without_codegen")
def test_a_graph_without_attention_says_so():
    torch.compile(nn.Linear(3, 3), backend="mla")(torch.randn(2, 3))
    assert mla_compile.last_report().note == "stock Inductor, no attention in the graph"


@pytest.mark.slow  # test_deterministic.py has some in every run
def test_gradients_through_generated_code():
    module = Combined()
    with torch.enable_grad():
        x, cache = decode_inputs()
        eager, _ = module(x, cache)
        compiled, _ = torch.compile(module, backend="mla")(x, cache)
        (gradient,) = torch.autograd.grad(compiled.sum(), module.kv_b_proj.weight)
        (expected,) = torch.autograd.grad(eager.sum(), module.kv_b_proj.weight)
    torch.testing.assert_close(gradient, expected)
    assert mla_compile.last_report().rewritten == 1


@pytest.mark.usefixtures("without_codegen")
def test_inference_mode_is_rewritten():
    module = Combined()
    with torch.inference_mode():
        x, cache = decode_inputs()
        compiled, _ = torch.compile(module, backend="mla")(x, cache)
        torch.testing.assert_close(compiled, module(x, cache)[0])
    assert mla_compile.last_report().rewritten == 1


@pytest.mark.usefixtures("without_codegen")
def test_autocast_is_rewritten_in_the_dtype_of_autocast():
    module, (x, cache) = Combined(), decode_inputs()
    exact, _ = module(x, cache)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager, _ = module(x, cache)
        compiled, _ = torch.compile(module, backend="mla")(x, cache)
    assert mla_compile.last_report().rewritten == 1
    assert compiled.dtype == eager.dtype == torch.bfloat16
    assert (compiled - exact).abs().max() <= 2 * (eager - exact).abs().max() + 2**-8 * exact.abs().max()


@pytest.mark.usefixtures("without_codegen")
def test_off_leaves_the_graph_to_stock_inductor():
    torch.compile(Combined(), backend="mla", options={"mla.path": "off"})(*decode_inputs())
    assert mla_compile.last_report().note == "stock Inductor, mla.path is off"


def test_strict_raises_where_an_attention_stays_unchanged():
    compiled = torch.compile(Ordinary(), backend="mla", options={"mla.strict": True})
    with pytest.raises(Exception, match="StrictError") as caught:
        compiled(torch.randn(2, 16, 32))
    assert "1 of 1 attentions stay unchanged" in str(caught.value)
    assert "expected a latent less than half as wide as the keys and the values it expands to" in str(caught.value)


@pytest.mark.usefixtures("without_codegen")
def test_in_training_no_option_is_named_that_would_change_nothing():
    with torch.enable_grad():
        torch.compile(Ordinary(), backend="mla")(torch.randn(2, 16, 32))
    (site,) = mla_compile.last_report().sites
    assert "expected a latent less than half as wide" in site.reason
    assert "mla.path" not in site.remedy


def test_strict_raises_where_there_is_no_attention():
    compiled = torch.compile(nn.Linear(4, 4), backend="mla", options={"mla.strict": True})
    with pytest.raises(Exception, match="expected a model with MLA attention, found none"):
        compiled(torch.randn(2, 4))


@pytest.mark.usefixtures("without_codegen")
def test_verify_accepts_a_right_rewrite_and_checks_only_once():
    module, inputs = Combined(), decode_inputs()
    compiled = torch.compile(module, backend="mla", options={"mla.verify": True})
    for _ in range(2):
        torch.testing.assert_close(compiled(*inputs)[0], module(*inputs)[0])


@pytest.mark.usefixtures("without_codegen", "wrong_rewriter")
def test_verify_raises_on_a_wrong_rewrite():
    compiled = torch.compile(Combined(), backend="mla", options={"mla.verify": True})
    with pytest.raises(mla_compile.VerifyError, match="the absorbed path differs from the original by"):
        compiled(*decode_inputs())


@pytest.mark.usefixtures("without_codegen")
def test_a_latent_that_serves_something_else_too_is_still_right():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.mla = Combined()

        def forward(self, x, cache):
            output, (latent, _) = self.mla(x, cache)
            return output + latent.mean(), self.mla.kv_b_proj(latent)

    module, inputs = Reader(), decode_inputs()
    for compiled, eager in zip(torch.compile(module, backend="mla")(*inputs), module(*inputs), strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.usefixtures("without_codegen")
def test_an_output_that_is_viewed_behind_a_graph_break():
    """Its view needs the strides that eager has."""

    def attend(q, latent, weight):
        k, v = (latent @ weight).unflatten(-1, (4, 24)).transpose(1, 2).split([16, 8], dim=-1)
        o = F.scaled_dot_product_attention(q, k, v)
        torch._dynamo.graph_break()
        return o.view(-1, 8)

    inputs = torch.randn(2, 4, 3, 16), torch.randn(2, 50, 6), torch.randn(6, 96)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(attend, backend="mla")(*inputs), attend(*inputs))
    assert any(report.rewritten for report in mla_compile.reports())


@pytest.mark.usefixtures("without_codegen")
def test_a_mask_of_the_wrong_shape_is_an_error_as_in_eager():
    x, cache = decode_inputs()
    mask = torch.ones(1, 1, 1, 17, dtype=torch.bool)
    for run in (Combined(), torch.compile(Combined(), backend="mla")):
        with pytest.raises((RuntimeError, torch._dynamo.exc.TorchRuntimeError)):
            run(x, cache, mask)


@pytest.mark.usefixtures("without_codegen")
def test_a_cache_that_is_too_short_is_an_error_as_in_eager():
    from tests.models import Separate

    for run in (Separate(), torch.compile(Separate(), backend="mla")):
        cache = Separate().empty_cache(1)
        cache["length"].fill_(Separate.LENGTH)
        with pytest.raises((RuntimeError, IndexError)):
            run(torch.randn(1, 1, HIDDEN), cache)


@pytest.mark.usefixtures("without_codegen")
def test_one_compilation_serves_a_range_of_lengths_and_guards_its_path():
    module = Combined()
    compiled = torch.compile(module, backend="mla")
    for tokens in (300, 301, 350, 400, 5000):
        x, cache = decode_inputs(tokens)
        torch.testing.assert_close(compiled(x, cache)[0], module(x, cache)[0])
    assert len(mla_compile.reports()) == 2
    assert {site.path for report in mla_compile.reports() for site in report.sites} == {"absorbed"}


@pytest.mark.usefixtures("without_codegen")
def test_a_symbolic_number_of_queries_takes_each_path_in_its_range():
    module = Combined()
    compiled = torch.compile(module, backend="mla", dynamic=True)
    paths = {}
    for queries, tokens in ((2, 4000), (3, 5000), (600, 40), (700, 50), (4, 6000)):
        cache = torch.randn(1, tokens, L), torch.randn(1, tokens, R)
        x = torch.randn(1, queries, HIDDEN)
        before = len(mla_compile.reports())
        torch.testing.assert_close(compiled(x, cache)[0], module(x, cache)[0])
        if len(mla_compile.reports()) > before:
            paths[queries] = mla_compile.last_report().sites[0].path
    assert paths == {2: "absorbed", 600: "chunked"}


@pytest.mark.parametrize(
    ("module", "inputs", "sites"),
    [(Combined, decode_inputs, ["absorbed"]), (Ordinary, lambda: (torch.randn(1, 5, 32),), ["unchanged"])],
    ids=["rewritten", "nothing to rewrite"],
)
def test_explain_has_no_code_generated(module, inputs, sites, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("Inductor was asked for code")

    monkeypatch.setattr("torch._inductor.graph.GraphLowering.compile_to_module", refuse)
    module, inputs = module(), inputs()
    before = len(mla_compile.reports())
    assert [site.path for site in mla_compile.explain(module, *inputs).sites] == sites
    assert len(mla_compile.reports()) == before + 1
    with pytest.raises(Exception, match="Inductor was asked for code"):
        torch.compile(module, backend="mla")(*inputs)


@pytest.mark.usefixtures("without_codegen")
@torch._dynamo.config.patch(recompile_limit=2)
def test_explain_takes_no_variant_of_those_that_torch_compiles():
    """Nor does it count those of earlier explanations, also where the graph breaks."""
    module = Broken()
    for _ in range(3):
        assert [site.path for site in mla_compile.explain(module, *decode_inputs()).sites] == ["absorbed"] * 2
    before = len(mla_compile.reports())
    torch.compile(module, backend="mla")(*decode_inputs())
    assert sum(len(report.sites) for report in mla_compile.reports()[before:]) == 2


@pytest.mark.usefixtures("without_codegen")
def test_explain_says_nothing_of_what_is_compiled_meanwhile():
    class Recording(Combined):
        def forward(self, *args):
            torch.compiler.disable(lambda: mla_compile.report.record(mla_compile.Report(())))()
            return super().forward(*args)

    assert len(mla_compile.explain(Recording(), *decode_inputs()).sites) == 1


@pytest.mark.usefixtures("without_codegen")
def test_explain_takes_a_function_of_a_module_that_cannot_be_imported():
    names = {"__name__": "nowhere", "inner": Combined(), "torch": torch}
    exec("def function(x, cache):\n    return inner(torch.tanh(x), cache)", names)
    assert len(mla_compile.explain(names["function"], *decode_inputs()).sites) == 1


@pytest.mark.usefixtures("without_codegen")
def test_explain_looks_into_what_is_compiled_already():
    module = Combined()
    module.compile(backend="mla")
    module(*decode_inputs())
    for compiled in (module, torch.compile(module, backend="mla")):
        assert [site.path for site in mla_compile.explain(compiled, *decode_inputs()).sites] == ["absorbed"]
    before = len(mla_compile.reports())
    module(*decode_inputs())
    assert len(mla_compile.reports()) == before, "what was compiled is still there"


def test_explain_runs_outside_of_the_code_that_calls_it():
    module, inputs = Combined(), decode_inputs()

    def asking(x):
        return x + mla_compile.explain(module, *inputs).rewritten

    compiled = torch.compile(asking, backend="eager")
    assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))


def test_explain_traces_afresh_and_says_what_happened():
    report = mla_compile.explain(Combined(), *decode_inputs())
    assert [site.path for site in report.sites] == ["absorbed"]
    text = str(report)
    assert text.startswith("1 of 1 attentions rewritten")
    assert "compile/../models.py" in text or "tests/models.py:" in text
    assert math.isfinite(report.seconds["compile"])
    assert mla_compile.Report.from_json(report.to_json()) == report
