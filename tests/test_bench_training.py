"""`mla-compile bench --train` on a tiny layer: wrong gradients, NaN included, get no time. No test looks at a time."""

from __future__ import annotations

import pytest
import torch

from mla_compile.bench import command, memory, training
from mla_compile.cli import main
from tests.test_bench import TINY

pytestmark = pytest.mark.usefixtures("imports_frozen")


class NoNumber(torch.autograd.Function):
    """The identity, with NaN as its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, torch.nan)


@pytest.fixture
def steps(monkeypatch):
    """A function that makes all modes eager, with `spoil` applied to the output of `mla`. Memory is not measured."""

    def set_up(spoil):
        def step(mode, built):
            def run(arguments):
                output = built.attention(**arguments)[0]
                return spoil(output) if mode == "mla" else output

            return run

        monkeypatch.setattr(training, "_step", step)

    monkeypatch.setattr(training, "CHECKED_TOKENS", 8)
    monkeypatch.setattr(training, "_memory", lambda *task: (None, None))
    monkeypatch.setitem(command.LAYERS, "v2-lite", TINY["v2"])
    return set_up


WRONG = " away from float64, rounding explains at most"


@pytest.mark.parametrize(
    ("spoil", "dtype", "status", "words"),
    [
        (lambda output: output, "float32", 0, ""),
        (lambda output: output, "bfloat16", 0, ""),
        pytest.param(NoNumber.apply, "float32", 1, f"is inf{WRONG}", marks=pytest.mark.slow),
        (lambda output: 1.01 * output, "float32", 1, WRONG),
        pytest.param(lambda output: 1.1 * output, "bfloat16", 1, WRONG, marks=pytest.mark.slow),
    ],
    ids=["right", "right, bfloat16", "no numbers", "other numbers", "other numbers, bfloat16"],
)
def test_wrong_gradients_get_no_time_and_fail(steps, capsys, spoil, dtype, status, words):
    steps(spoil)
    with torch.enable_grad():
        assert main(["bench", "--layer", "v2-lite", "--dtype", dtype, "--train", "8", "--repeats", "1"]) == status
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[:2] == ["8", "mla"]]
    assert words in row
    assert (row.split()[2] == "-") == bool(words)


def test_what_does_not_fit_is_not_tried(steps, capsys, monkeypatch):
    steps(lambda output: output)
    needed = {mode: memory.needed_to_train(TINY["v2"], mode, 64) for mode in training.MODES}
    assert needed["mla"] < needed["inductor"] == needed["checkpointed"]
    monkeypatch.setattr(memory, "available_bytes", lambda: needed["mla"])
    with torch.enable_grad():
        assert main(["bench", "--layer", "v2-lite", "--train", "64", "--repeats", "1"]) == 0
    rows = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["64"]}
    assert {mode: "GiB are available" in row for mode, row in rows.items()} == {
        "inductor": True,
        "checkpointed": True,
        "mla": False,
    }
