"""Inductor's caches of compiled artifacts stay on, and never serve one made under other options or other passes."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mla_compile
from mla_compile import attempt
from tests.models import HIDDEN, Combined, L, R

SCRIPT = """
import json, sys
import torch, mla_compile
from torch._dynamo.utils import counters
import mla_compile.artifacts as artifacts
sys.path.insert(0, {root!r})
from tests.models import Combined, HIDDEN, L, R

passes = json.loads(sys.argv[2])
if passes:
    sources = artifacts._sources()
    artifacts._sources = lambda: sources + passes
torch.manual_seed(0)
module = Combined()


def step(x, cache):
    return module(x + {salt}, cache)[0]


for options in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    counters.clear()
    before = len(mla_compile.reports())
    compiled = torch.compile(step, backend="mla", dynamic=True, options=options)
    error = 0.0
    with torch.no_grad():
        for tokens in (40, 60):
            x, cache = torch.randn(1, 1, HIDDEN), (torch.randn(1, tokens, L), torch.randn(1, tokens, R))
            error = max(error, float((compiled(x, cache) - step(x, cache)).abs().max()))
    reports = mla_compile.reports()[before:]
    print(json.dumps({{
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "misses": counters["aot_autograd"]["autograd_cache_miss"],
        "ran": [("passes" in report.seconds) for report in reports],
        "paths": [site.path for report in reports for site in report.sites],
        "guards": [site.guards for report in reports for site in report.sites],
        "error": error,
    }}))
"""


@pytest.fixture(scope="module")
def process():
    """A function that runs the script in a new process, with one set of options after another.

    A random number in the compiled function makes sure that no other test has compiled it. So the processes can share
    the cache directory of all tests, which has the C++ kernels, whose compilation takes longest.
    """
    script = SCRIPT.format(root=str(Path(__file__).parents[2]), salt=random.SystemRandom().random())
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "mla_compile"
    before = set(folder.glob("*.json"))

    def run(*options, passes=""):
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, json.dumps(options), json.dumps(passes)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-4000:]
        return [json.loads(line) for line in result.stdout.splitlines()[-len(options) :]]

    (run.first,) = run({})
    run.then = run({}, {"mla.path": "chunked"})
    run.reports = lambda: set(folder.glob("*.json")) - before
    return run


def test_a_second_process_is_served_the_artifact_and_its_report(process):
    first, second = process.first, process.then[0]
    assert first["misses"] == 1
    assert first["ran"] == [True]
    assert second["hits"] == 1
    assert second["ran"] == [False]
    assert second["paths"] == first["paths"] == ["absorbed"]
    assert second["guards"] == first["guards"]
    assert max(first["error"], second["error"]) < 1e-5


def test_other_options_are_another_artifact(process):
    other = process.then[1]
    assert other["hits"] == 0
    assert other["paths"] == ["chunked"]
    assert other["error"] < 1e-5


@pytest.mark.slow
def test_another_version_of_the_passes_is_another_artifact(process):
    (other,) = process({}, passes="changed")
    assert other["hits"] == 0
    assert other["ran"] == [True]


@pytest.mark.slow
def test_a_lost_report_is_made_again(process):
    for report in process.reports():
        if not report.name.startswith("device"):
            report.unlink()
    (again,) = process({})
    assert again["paths"] == ["absorbed"]
    assert again["error"] < 1e-5


@pytest.mark.parametrize("option", ["triton.cudagraphs", pytest.param("max_autotune", marks=pytest.mark.slow)])
def test_a_report_is_that_of_graphs_that_are_recorded_or_not(monkeypatch, option):
    """It says which kernels will run, which depends on that."""
    salt, kernels_of = random.random(), lambda graph, kernels, *, recorded: (f"recorded: {recorded}",)
    monkeypatch.setattr(attempt, "kernels_of", kernels_of)
    module = Combined()
    said = []
    for options in ({}, {option: True}, {}):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, cache: module(x + salt, cache)[0], backend="mla", options=options)
        compiled(torch.randn(1, 1, HIDDEN), (torch.randn(1, 40, L), torch.randn(1, 40, R)))
        said += mla_compile.last_report().kernels
    assert said == ["recorded: False", "recorded: True", "recorded: False"]
