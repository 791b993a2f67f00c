"""Naive modules in plain torch, with no thought of this library: rewritten, and as right as eager."""

import copy

import pytest
import torch

import mla_compile
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, Combined, Inference, Separate

STEPS = (6, 1, 1, 1, 3)
"""Query tokens of each call: a prefill, decode steps, and several tokens at once."""

MODULES = {
    "one kv_b_proj": lambda: Combined(),
    "q-LoRA": lambda: Combined(q_lora=True),
    "W_UK and W_UV apart": Separate,
    "two summed scores": Inference,
    "absorbed by hand": lambda: Inference(absorb=True),
}
SLOW = "q-LoRA", "two summed scores"
SOON = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODULES]
"""Slow are the module that differs only in its queries (tests of transformers' DeepSeek-V3 cover q-LoRA too), and the
one with two scores, which `absorbed by hand` has too."""


def run(module, cache, xs):
    outputs = []
    for x in xs:
        output, cache = module(x, cache)
        outputs.append(output)
    return outputs


def check(module, dtype, batch=2, options=None):
    """Compile, compare each step with eager and float64, and return the reports."""
    xs = [torch.randn(batch, steps, HIDDEN, dtype=torch.float64) for steps in STEPS]
    exact = run(copy.deepcopy(module).double(), module.empty_cache(batch, torch.float64), xs)
    module = module.to(dtype)
    xs = [x.to(dtype) for x in xs]
    eager = run(module, module.empty_cache(batch, dtype), xs)
    compiled = run(torch.compile(module, backend="mla", options=options), module.empty_cache(batch, dtype), xs)
    for c, e, x in zip(compiled, eager, exact, strict=True):
        assert_as_close_as_eager(c, e, x)
    return mla_compile.reports()


@pytest.mark.diagonal
@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", SOON)
def test_every_attention_is_rewritten_and_as_right_as_eager(name, dtype):
    reports = check(MODULES[name](), dtype)
    assert len(reports) >= 3
    for report in reports:
        assert [site.path for site in report.sites] in (["absorbed"], ["chunked"]), report
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.diagonal
@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("path", ["absorbed", "chunked"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", [SOON[0], SOON[1], SOON[2], pytest.param(list(MODULES)[3], marks=pytest.mark.slow)])
def test_both_paths_are_right_at_every_shape(name, batch, path):
    reports = check(MODULES[name](), torch.float32, batch, {"mla.path": path, "mla.workspace_tokens": 4})
    assert {site.path for report in reports for site in report.sites} == {path}


@pytest.mark.slow  # test_artifacts.py has both paths, of symbolic lengths, in every run
def test_with_generated_code():
    reports = check(Combined(), torch.float32)
    assert all(report.rewritten == 1 for report in reports)


@pytest.mark.usefixtures("without_codegen")
def test_the_report_names_the_line_of_the_module():
    module = torch.compile(Combined(), backend="mla")
    module(torch.randn(1, 1, HIDDEN), tuple(torch.randn(1, 40, width) for width in (16, 8)))
    (site,) = mla_compile.last_report().sites
    assert "tests/models.py:" in site.location
    assert "scaled_dot_product_attention" in site.code
    sizes = {"B": 1, "Sq": 1, "T": 41, "N": 4, "L": 16, "P": 12, "V": 10, "R": 8}
    assert site.shapes == {word: str(size) for word, size in sizes.items()}


@pytest.mark.usefixtures("without_codegen")
def test_lengths_that_the_code_writes_down():
    """Lengths from a `torch.tensor([...])` in the code are a constant of the graph, which the paged op takes."""

    def attend(q, pages, table):
        keys = pages[table].flatten(1, 2)[:, None].expand(-1, q.shape[1], -1, -1)
        seen = torch.arange(keys.shape[2]) < torch.tensor([9, 11])[:, None]
        return torch.nn.functional.scaled_dot_product_attention(q, keys, keys[..., :8], seen[:, None, None])

    inputs = torch.randn(2, 4, 1, 10), torch.randn(8, 4, 10), torch.tensor([[1, 3, 5], [0, 2, 7]])
    with torch.no_grad():
        compiled = torch.compile(attend, backend="mla")(*inputs)
    (site,) = mla_compile.last_report().sites
    assert (site.path, site.mask) == ("absorbed", "lengths")
    assert site.reason.endswith("reads the pages")
    exact = attend(inputs[0].double(), inputs[1].double(), inputs[2])
    assert_as_close_as_eager(compiled, attend(*inputs), exact)
