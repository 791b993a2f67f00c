"""Over a link between two network namespaces, a step sends the bytes of the formula in the time of the cost model."""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla_compile.cost import Link
from tests.distributed.namespaces import FORMS, RATES

pytestmark = pytest.mark.slow

NEEDED = "ip link add mla0 type veth peer name mla1 && tc qdisc add dev mla0 root tbf rate 1mbit burst 32k latency 50ms"
HEADERS = 1.02
"""The most bytes sent per byte of the formula: packets of up to 64 KiB have headers, and are acknowledged."""


def allowed():
    """Why two network namespaces cannot be joined here; empty if they can."""
    try:
        tried = subprocess.run(["unshare", "-rn", "sh", "-c", NEEDED], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return tried.stderr


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What each rank measured of each form."""
    if why := allowed():
        pytest.skip(f"no network namespaces joined by a shaped link: {why}")
    folder = tmp_path_factory.mktemp("link")
    command = ["unshare", "-rn", sys.executable, "-m", "tests.distributed.namespaces", str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("index", range(len(FORMS)), ids=[form.__name__ for form in FORMS])
def test_a_step_sends_the_bytes_of_the_formula(measured, index):
    """Each of two ranks sends what the other receives."""
    for of_rank in measured:
        formula, sent, _ = of_rank[index]
        assert formula <= sent <= HEADERS * formula


def usual(*of_ranks):
    """The median of the seconds from when the first rank began a step until the last one ended it."""
    steps = zip(*of_ranks, strict=True)
    return statistics.median(max(end for _, end in step) - min(start for start, _ in step) for step in steps)


@pytest.mark.parametrize("index", range(len(FORMS)), ids=[form.__name__ for form in FORMS])
def test_a_steps_time_has_the_slope_of_the_model(measured, index):
    """How much longer a step takes over the slowest link than over the fastest, measured and by the model."""
    formula, *_ = measured[0][index]
    seconds = [usual(*of_ranks) for of_ranks in zip(*(of_rank[index][2] for of_rank in measured), strict=True)]
    times = [Link(rate * 1e6 / 8, 0.0).time(0, formula) for rate in RATES]
    slope = (seconds[0] - seconds[-1]) / (times[0] - times[-1])
    assert 0.9 <= slope <= 1.2  # 66 bytes of headers for 1,448: 1.05; and the other work of a busy machine
    assert seconds == sorted(seconds, reverse=True)
