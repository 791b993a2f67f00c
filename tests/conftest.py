"""Fixtures that every test may use."""

import atexit
import json
import os
import shutil
import tempfile

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
from tests import diagonal
from tests.without_codegen import without_codegen

# Dynamo looks for garbage after each graph, which took 1 to 4 % of the time of tests that compile a model.
torch._dynamo.config.run_gc_after_compile = False


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
def no_codegen():
    """Run graphs as they are, instead of generating C++: the same graphs, in less time."""
    with without_codegen():
        yield


@pytest.fixture
def config(tmp_path):
    """Writes a config.json of these fields, and returns its directory."""

    def write(**fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return tmp_path

    return write
