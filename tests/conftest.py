"""Fixtures that every test may use."""

import atexit
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

# Before torch is imported: artifacts of earlier runs must not decide what a test sees. Processes of one run, those that
# tests start too, have one folder: what a C++ compiler made for one serves all.
if os.environ.get("MLA_COMPILE_TESTS_CACHE") is None:
    os.environ["MLA_COMPILE_TESTS_CACHE"] = tempfile.mkdtemp(prefix="mla-compile-tests-")
    atexit.register(shutil.rmtree, os.environ["MLA_COMPILE_TESTS_CACHE"], ignore_errors=True)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["MLA_COMPILE_TESTS_CACHE"]

if "PYTEST_XDIST_WORKER" in os.environ:  # they share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from mla_compile import report
from mla_compile.passes import pipeline
from mla_compile.passes.graph.rewriter import Rewriter
from tests import diagonal
from tests.without_codegen import without_codegen

# Dynamo looks for garbage after each graph, which took 1 to 4 % of the time of tests that compile a model.
torch._dynamo.config.run_gc_after_compile = False
# And it empties the CPU's caches to time a graph's guards, for a log that nobody reads: 23 ms each.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# pytest listens to every logger that does not propagate. Who listens to this one has torch, and us, print each graph of
# each compilation into it, several times: 5 % of the time of tests that compile. Tests of what is to be read there ask
# for it themselves.
torch._logging._internal.trace_log.propagate = True


LONG = (
    "hf/test_families.py",
    "hf/test_paged_cache.py",
    "kernels/test_interpreted.py",
    "kernels/test_ahead_of_time.py",
    "kernels/test_instruction_sets.py",
    "compile/test_plain_torch.py",
    "distributed/test_gathered_keys.py",
    "test_docs.py",
    "test_spellings.py",
    "compile/test_trained_by_heads.py",
    "kernels/test_library.py",
    "test_gpu_launches.py",
    "test_bench.py",
    "compile/test_adapters.py",
    "test_fake_cuda.py",
    "kernels/test_finite_products.py",
    "compile/test_backend.py",
    "passes/paths/test_by_heads.py",
    "compile/test_exported.py",
    "hf/test_generate.py",
    "test_lowered.py",
    "test_serve.py",
    "hf/test_training.py",
    "hf/test_trainer.py",
    "compile/test_artifacts.py",
    "compile/test_training_processes.py",
)
"""Files that take longest come first: of several processes, one that begins such a file when the others are done keeps
all waiting. `make test` tells xdist to leave it so, which else begins with the files of most tests."""


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))
    diagonal.mark_others_slow(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def fresh_compiler():
    """No compiled code, no report and no seed of another test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    report._HISTORY.clear()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(name="without_codegen")
def no_codegen(monkeypatch):
    """Run graphs as they are, instead of generating C++: the same graphs, in less time."""
    with without_codegen():
        yield
        monkeypatch.undo()  # what a test put over it, before it is itself undone


@pytest.fixture
def wrong_rewriter(monkeypatch):
    """The passes rewrite attention as that of scores a tenth larger."""

    class Wrong(Rewriter):
        def __call__(self, site, *rest):
            return super().__call__(replace(site, nope=replace(site.nope, scale=1.1 * site.nope.scale)), *rest)

    monkeypatch.setattr(pipeline, "Rewriter", Wrong)


@pytest.fixture
def config(tmp_path):
    """Writes a config.json of these fields, and returns its directory."""

    def write(**fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return tmp_path

    return write
