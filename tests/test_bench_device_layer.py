"""The benchmark of a layer on a GPU, run on the CPU: what is timed is right, and what is wrong gets no time."""

import csv
from io import StringIO

import pytest
import torch

pytest.importorskip("transformers")

from mla_compile.bench import device_layer
from mla_compile.bench.device_layer import Row, as_csv, as_text, run
from mla_compile.bench.layers import Layer, build

TINY = Layer("tiny-v3", "deepseek_v3", hidden=64, N=4, Lq=24, L=32, P=16, R=8, V=12)
CPU = torch.device("cpu")


def once(call):
    call()
    return 0.002


def measured(modes):
    return run(TINY, [37], modes, CPU, torch.float32, once)


def test_steps_are_right_call_after_call():
    eager, by_hand = measured(["eager", "by-hand"])
    assert [(row.context, row.mode, row.seconds, row.note) for row in (eager, by_hand)] == [
        (37, "eager", 0.002, ""),
        (37, "by-hand", 0.002, ""),
    ]
    assert 0 < by_hand.error < 1e-5


def test_compiled_steps_are_right_and_make_their_mask(monkeypatch):
    """As whole models do, since the passes know nothing of a mask that is an input."""
    compiled, given = torch.compile, []

    def graph(module, inputs):
        given.extend(tensor.dtype for tensor in inputs if isinstance(tensor, torch.Tensor))
        return module

    def without_code(module, backend, mode):
        assert (backend, mode) == ("mla", "reduce-overhead")
        return compiled(module, backend=graph, fullgraph=True)

    monkeypatch.setattr(torch, "compile", without_code)
    (row,) = measured(["mla"])
    assert (row.seconds, row.note) == (0.002, "")
    assert given
    assert torch.bool not in given


def test_what_is_wrong_or_fails_gets_no_time(monkeypatch):
    def fail(arguments):
        raise ValueError("no such thing")

    others = {"more": lambda built: lambda arguments: built.attention(**arguments)[0] * 1.01, "none": lambda _: fail}
    monkeypatch.setattr(device_layer, "MODES", device_layer.MODES | others)
    more, none = measured(["more", "none"])
    assert more.seconds is none.seconds is None
    assert more.note.startswith("wrong: rounding explains at most")
    assert none.note == "failed: ValueError: no such thing"


def test_the_table():
    text = as_text(
        [Row(4096, "inductor", 2e-3, 1e-3), Row(4096, "mla", 1e-4, 1e-3), Row(4096, "eager", None, None, "x")]
    )
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["4096", "inductor", "2000.0", "1.00", "1e-03"],
        ["4096", "mla", "100.0", "20.00", "1e-03"],
        ["4096", "eager", "-", "-", "-", "x"],
    ]


def test_what_is_measured_is_there_before_the_rest(monkeypatch, capsys):
    """A run that ends in the middle leaves figures."""

    def interrupt(built):
        raise KeyboardInterrupt

    monkeypatch.setattr(device_layer, "MODES", device_layer.MODES | {"long": interrupt})
    kept = []
    with pytest.raises(KeyboardInterrupt):
        run(TINY, [37], ["eager", "long"], CPU, torch.float32, once, lambda rows: kept.append(as_csv(rows)))
    (table,) = kept
    (row,) = csv.DictReader(StringIO(table))
    assert (row["context"], row["mode"], float(row["us"]), row["speed_up"]) == ("37", "eager", 2000.0, "")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["tiny-v3: weights", "tiny-v3, context 37: float64", "tiny-v3, context 37: eager"]
    assert lines[3].split()[:4] == ["37", "eager", "2000.0", "-"]
    assert lines[4:] == ["tiny-v3, context 37: long"]


def test_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        device_layer,
        "run",
        lambda layer, contexts, modes, device, progress: run(TINY, contexts, modes, CPU, torch.float32, once, progress),
    )
    table = tmp_path / "layer.csv"
    asked = ["device_layer", "--contexts", "37", "--modes", "eager", "by-hand", "--csv", str(table)]
    monkeypatch.setattr("sys.argv", asked)
    device_layer.main()
    assert [row["mode"] for row in csv.DictReader(StringIO(table.read_text()))] == ["eager", "by-hand"]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_weights_are_drawn_where_they_stay(monkeypatch):
    """On `meta`, for which torch has no generator, in place of a GPU."""
    asked, generator = [], torch.Generator

    def generator_of(device):
        asked.append(device)
        return generator()

    monkeypatch.setattr(torch, "Generator", generator_of)
    meta = torch.device("meta")
    built = build(TINY, meta)
    assert {tensor.device for tensor in (*built.attention.parameters(), *built.rotary.buffers())} == {meta}
    assert asked == [meta]


@pytest.mark.gpu
def test_on_a_gpu():
    rows = run(TINY, [64], ["eager", "inductor", "by-hand", "mla"], torch.device("cuda"))
    assert {(row.mode, row.note) for row in rows} == {(mode, "") for mode in ("eager", "inductor", "by-hand", "mla")}
