"""Decoding by whole models on a GPU, as the benchmark times it: here on the CPU, with a small model."""

import dataclasses
import sys

import pytest
import torch

pytest.importorskip("transformers")

import mla_compile
from mla_compile.bench import device_model
from mla_compile.bench.device_model import Row, as_text, run
from mla_compile.bench.generation.models import MODELS

WHOLE = dataclasses.replace(
    MODELS["v2-lite"].cut_to(2),
    layer=dataclasses.replace(MODELS["v2-lite"].layer, hidden=128, N=4, L=64, P=16, R=8, V=16),
    intermediate=64,
    expert_intermediate=32,
    vocabulary=192,
)


@pytest.mark.parametrize("mode", ["eager", pytest.param("mla", marks=pytest.mark.slow)])
def test_a_mode_is_checked_and_timed(mode):
    (row,) = run(WHOLE, [2], 12, [mode], torch.device("cpu"), steps=4)
    assert (row.batch, row.mode, row.note) == (2, mode, "")
    assert row.seconds > 0
    assert 0 < row.error < 0.1
    assert (mla_compile.last_report() is not None) == (mode == "mla")


def test_a_wrong_mode_has_no_time(monkeypatch):
    checked, calls = device_model._checked, []

    def wrong(model, ids, context, cache):
        calls.append(1)
        found = checked(model, ids, context, cache)
        return found if len(calls) <= 2 else found * 1.5

    monkeypatch.setattr(device_model, "_checked", wrong)
    (row,) = run(WHOLE, [1], 5, ["eager"], torch.device("cpu"), steps=2)
    assert row.seconds is None
    assert row.note.startswith("wrong: rounding explains at most")


def test_a_mode_that_fails_is_a_result(monkeypatch):
    monkeypatch.setattr(device_model, "_decode", lambda *_: 1 / 0)
    (row,) = run(WHOLE, [1], 5, ["eager"], torch.device("cpu"))
    assert row.note == "failed: ZeroDivisionError: division by zero"


def test_the_table():
    rows = [Row(16, "inductor", 4e-3, 0.01), Row(16, "mla", 1e-3, 0.01), Row(16, "eager", None, None, "failed: why")]
    head, _, mla, failed = as_text(rows).splitlines()
    assert head.split()[-2:] == ["speed-up", "error"]
    assert mla.split() == ["16", "mla", "1000", "16000", "4.00", "1.0e-02"]
    assert failed.split()[:6] == ["16", "eager", "-", "-", "-", "-"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_it_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["device_model"])
    with pytest.raises(SystemExit):
        device_model.main()
    assert "expected a GPU that torch sees, found none" in capsys.readouterr().err
