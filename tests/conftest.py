"""Fixtures that every test may use."""

import atexit
import gc
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

# Set before torch is imported, so that artifacts of earlier runs do not decide what a test sees. All processes of a
# run, including those that tests start, share one folder, so that C++ is compiled once for all.
if os.environ.get("MLA_COMPILE_TESTS_CACHE") is None:
    os.environ["MLA_COMPILE_TESTS_CACHE"] = tempfile.mkdtemp(prefix="mla-compile-tests-")
    atexit.register(shutil.rmtree, os.environ["MLA_COMPILE_TESTS_CACHE"], ignore_errors=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["MLA_COMPILE_TESTS_CACHE"]

if "PYTEST_XDIST_WORKER" in os.environ:  # they share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Inductor would start as many processes that compile as there are cores, for each of them.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa
from torch.fx import _lazy_graph_module

from mla_compile import report
from mla_compile.passes import pipeline
from mla_compile.passes.graph.rewriter import Rewriter
from tests import diagonal
from tests.without_codegen import without_codegen

# Compilation makes so many objects that looking for garbage each time there are 700 more took 11 to 18 % of the time.
gc.set_threshold(20_000)
# Dynamo collects garbage after each graph, which took 1 to 4 % of the time of tests that compile a model.
torch._dynamo.config.run_gc_after_compile = False
# It also empties the CPU's caches to time a graph's guards, for a log that nobody reads: 23 ms each.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# Dynamo has Inductor and its passes write the Python of a graph when it is called, so that none is written of graphs
# that are only read. So it is where tests call passes themselves: 3 to 5 % of their time.
_lazy_graph_module._use_lazy_graph_module_flag = True
# pytest attaches a handler to every logger that does not propagate. A handler on this one makes torch, and us, print
# each graph of each compilation several times: 5 % of the time of tests that compile. Tests that need this log
# request it themselves.
torch._logging._internal.trace_log.propagate = True


LONG = (
    "hf/test_families.py",
    "kernels/test_interpreted.py",
    "kernels/test_ahead_of_time.py",
    "kernels/test_instruction_sets.py",
    "compile/test_plain_torch.py",
    "compile/test_exported.py",
    "distributed/test_gathered_keys.py",
    "test_docs.py",
    "test_spellings.py",
    "compile/test_trained_by_heads.py",
    "hf/test_paged_cache.py",
    "kernels/test_library.py",
    "inductor/test_gpu_launches.py",
    "test_bench.py",
    "compile/test_trained_absorbed.py",
    "hf/test_continuous.py",
    "compile/test_adapters.py",
    "test_fake_cuda.py",
    "kernels/test_finite_products.py",
    "compile/test_backend.py",
    "passes/paths/test_by_heads.py",
    "test_lowered.py",
    "test_serve.py",
    "hf/test_training.py",
    "hf/test_trainer.py",
    "compile/test_artifacts.py",
    "compile/test_training_processes.py",
)
"""The files that take longest, in the order in which they run first. If a process started one when the others are done,
all would wait for it. `make test` tells xdist to keep this order; by default it starts with the files that have the
most tests."""


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))
    diagonal.mark_others_slow(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish() -> None:
    """Let `gc.collect`, which benchmarks and full pools call, pass over what has been imported: it took it 0.7 s."""
    gc.collect()
    gc.freeze()
    if "PYTEST_XDIST_WORKER" in os.environ:
        tell_of_instruction_sets()


def tell_of_instruction_sets() -> None:
    """Tell processes that tests start that this CPU and this compiler have what the CPU says it has, if they have.

    Each would find out by building a library for each set of instructions, if its cache is its own (8 s of the CPU),
    and by loading them (1 s).
    """
    tested = cpu_vec_isa.valid_vec_isa_list()
    with inductor_config.patch("cpp.vec_isa_ok", True):
        said = cpu_vec_isa.valid_vec_isa_list.__wrapped__()
    if said == tested:
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's library says at the end of the process that it leaks


@pytest.fixture(scope="module")
def imports_frozen():
    """The same for what has been imported since."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Start each test without compiled code, reports or the random state of another."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    report._HISTORY.clear()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(name="without_codegen")
def no_codegen(monkeypatch):
    """Interpret graphs instead of generating C++ for them: the same graphs, in less time."""
    with without_codegen():
        yield
        monkeypatch.undo()  # first undo what the test patched on top of it


@pytest.fixture
def wrong_rewriter(monkeypatch):
    """Make the passes rewrite attention wrongly: to one whose nope scores are a tenth larger."""

    class Wrong(Rewriter):
        def __call__(self, site, *rest):
            return super().__call__(replace(site, nope=replace(site.nope, scale=1.1 * site.nope.scale)), *rest)

    monkeypatch.setattr(pipeline, "Rewriter", Wrong)


@pytest.fixture
def config(tmp_path):
    """A function that writes a config.json with the given fields, and returns its directory."""

    def write(**fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return tmp_path

    return write
