"""How the tests themselves are run, beside other plugins and in several processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLUGIN = """
import warnings

import pytest

def pytest_configure(config):
    warnings.warn({text!r}, pytest.PytestWarning)
"""


def run(*arguments, **variables):
    """Run Python with these variables; None unsets one."""
    env = {name: value for name, value in (os.environ | variables).items() if value is not None}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("text", "ends_well"),
    [
        ("Benchmarks are automatically disabled because xdist plugin is active.Benchmarks cannot be", True),
        ("another warning", False),
    ],
)
def test_a_benchmark_plugin_that_is_switched_off_ends_nothing(tmp_path, text, ends_well):
    (tmp_path / "switched_off.py").write_text(PLUGIN.format(text=text))
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass")
    one = ("-m", "pytest", "-q", "-c", "pyproject.toml", "--noconftest", "-p", "switched_off", str(tmp_path))
    done = run(*one, PYTHONPATH=str(tmp_path))
    assert (done.returncode == 0) == ends_well, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("given", "threads"), [(None, "1"), ("3", "3")])
def test_processes_that_share_the_cores_start_none_to_compile(given, threads):
    """Unless somebody says otherwise."""
    looks = "import tests.conftest, torch._inductor.config as config; print(config.compile_threads)"
    done = run("-c", looks, PYTEST_XDIST_WORKER="gw0", TORCHINDUCTOR_COMPILE_THREADS=given)
    assert done.stdout.split() == [threads], done.stderr
