"""Stored reports: guards are read back as they were written, and each report belongs to inputs of one kind."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from mla_compile import cache_files
from mla_compile.passes.outcome import Outcome
from mla_compile.report import Report
from mla_compile.stored import ReportStore, _true

s, t = sympy.symbols("s0 s1", integer=True, positive=True)
SIZES = [FloorDiv(s, 2), FloorDiv(-s, 16), Max(0, s - 7), Min(s, t), Mod(s, 4), PythonMod(s, 4)]


@pytest.mark.parametrize("size", SIZES)
def test_a_guard_on_sizes_that_are_no_polynomial(size):
    value = int(size.subs({s: 9, t: 5}))
    assert _true(str(sympy.Ge(size * t + s, value * 5 + 9)), {"s0": 9, "s1": 5})
    assert not _true(str(sympy.Ge(size * t + s, value * 5 + 10)), {"s0": 9, "s1": 5})


class Coded(torch.Tensor):
    """A tensor that is made of another, as quantised weights are."""

    @staticmethod
    def __new__(cls, of, bits):
        return torch.Tensor._make_wrapper_subclass(cls, of.shape, dtype=torch.float32)

    def __init__(self, of, bits):
        self.of, self.bits = of, bits

    def __tensor_flatten__(self):
        return ["of"], {"bits": self.bits}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Coded(inner["of"], context["bits"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def store(weight):
    """The reports of a graph with one input."""
    graph = fx.Graph()
    graph.output(graph.placeholder("weight"))
    module = fx.GraphModule({}, graph)
    next(iter(module.graph.nodes)).meta["example_value"] = weight
    return ReportStore(module, [weight], "tests")


OTHERS = [
    torch.empty(3, 4),
    Coded(torch.empty(3, 4, dtype=torch.int8), 4),
    Coded(torch.empty(3, 4, dtype=torch.uint8), 8),
]


@pytest.mark.parametrize("other", OTHERS, ids=["no subclass", "another context", "made of another"])
def test_a_report_is_of_what_weights_are_made_of(other):
    store(Coded(torch.empty(3, 4, dtype=torch.int8), 8)).save(Report((), "kept"))
    assert store(Coded(torch.empty(3, 4, dtype=torch.int8), 8)).load() is not None
    assert store(other).load() is None


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    "other",
    [torch.empty(4, 3).t(), torch.empty(3, 4, requires_grad=True)],
    ids=["other strides", "gradients"],
)
def test_a_report_is_of_strides_and_gradients(other, own_cache):
    store(torch.empty(3, 4)).save(Report((), "kept"))
    assert store(torch.empty(3, 4)).load() is not None
    assert store(other).load() is None


def test_sparse_inputs_have_no_strides(own_cache):
    store(torch.eye(3).to_sparse()).save(Report((), "kept"))
    assert store(torch.eye(3).to_sparse()).load() is not None


def test_a_report_is_of_the_dtype_of_autocast(own_cache):
    weight = torch.empty(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        store(weight).save(Report((), "kept"))
        assert store(weight).load() is not None
    with torch.autocast("cpu", torch.float16):
        assert store(weight).load() is None
    assert store(weight).load() is None


def test_reports_that_are_saved_at_once_are_all_kept(own_cache, monkeypatch):
    def slow(*args, read=cache_files.read):
        found = read(*args)
        time.sleep(0.01)
        return found

    monkeypatch.setattr(cache_files, "read", slow)
    sizes = range(1, 9)
    reports = [
        Report((Outcome("bmm", "model.py:1", "", "absorbed", "few queries", guards=(f"Eq(s0, {size})",)),))
        for size in sizes
    ]
    with ThreadPoolExecutor(len(reports)) as pool:
        list(pool.map(store(torch.empty(3, 4)).save, reports))
    kept = {guard for report in store(torch.empty(3, 4))._read() for site in report.sites for guard in site.guards}
    assert kept == {f"Eq(s0, {size})" for size in sizes}
