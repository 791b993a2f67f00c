"""The command line: arguments in, exit status and files out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_compile import cli
from mla_compile.bench import command, run
from mla_compile.bench.measure import Result
from mla_compile.bench.run import Benchmark
from mla_compile.bench.workloads import Workload
from mla_compile.cost import Device
from mla_compile.parsing import file
from mla_compile.report import Report
from mla_compile.version import __version__

TINY = Path(__file__).parents[1] / "examples" / "tiny-deepseek-v3"


@pytest.fixture
def calls(monkeypatch):
    """Arguments of each benchmark that was asked for; every mode is `ok`, but the one named `by-hand` is `wrong`."""
    seen = []

    def fake(layer, workloads, modes, cache_kind, repeats):
        seen.append((layer.name, list(workloads), list(modes), cache_kind, repeats))
        results = [
            Result(mode, workload, "wrong" if mode == "by-hand" else "ok", "", (0.1, 0.2), 1e-7)
            for workload in workloads
            for mode in modes
        ]
        return Benchmark(layer, cache_kind, Device("d", 1e9, 1e9), 0.0, dict.fromkeys(workloads, 0.1), results, [])

    monkeypatch.setattr(run, "run", fake)
    return seen


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"mla-compile {__version__}\n"


def test_bench_has_defaults(calls):
    cli.main(["bench"])
    ((layer, workloads, modes, cache_kind, repeats),) = calls
    assert layer == "v2-lite"
    assert workloads == [Workload("decode", n) for n in (1024, 4096, 16384, 32768)] + [
        Workload("prefill", n) for n in (1024, 4096)
    ]
    assert modes == ["eager", "inductor", "by-hand", "mla"]
    assert (cache_kind, repeats) == ("dynamic", 10)


def test_bench_passes_its_arguments_on(calls):
    arguments = "bench --layer v3 --contexts 8 --prefill --modes eager --cache static --repeats 3"
    assert cli.main(arguments.split()) == 0
    assert calls == [("v3", [Workload("decode", 8)], ["eager"], "static", 3)]


def test_bench_takes_a_dtype(calls, capsys):
    assert cli.main(["bench", "--dtype", "bfloat16", "--contexts", "8", "--prefill", "--modes", "eager"]) == 0
    assert "GB/s, bfloat16, best of this run" in capsys.readouterr().out


def test_bench_writes_what_it_is_asked_for(calls, tmp_path, capsys):
    csv_file, json_file = tmp_path / "a.csv", tmp_path / "a.json"
    cli.main(["bench", "--modes", "eager", "--csv", str(csv_file), "--json", str(json_file)])
    assert csv_file.read_text().startswith("layer,dtype,cache,workload,tokens,mode,status,ms,")
    assert len(json.loads(json_file.read_text())["rows"]) == 6
    assert "decode at context 1024" in capsys.readouterr().out


def test_a_wrong_mode_fails_the_command(calls):
    assert cli.main(["bench", "--modes", "eager", "by-hand"]) == 1


def test_threads_are_set(calls, monkeypatch):
    threads = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    cli.main(["bench", "--modes", "eager", "--threads", "3"])
    assert threads == [3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--contexts", "0"], "expected a positive whole number, found 0"),
        (["bench", "--modes", "fastest"], "invalid choice: 'fastest'"),
        (["bench", "--contexts", "--prefill"], "expected at least one of --contexts and --prefill"),
        (["bench", "--plot", "times.xyz"], "expected a file that ends in .png, .svg, .pdf, found 'times.xyz'"),
        (["bench", "--csv", "/nowhere/a.csv"], "expected a file in a folder that exists, found '/nowhere/a.csv'"),
        (["bench", "--plot", "/nowhere/a.svg"], "expected a file in a folder that exists, found '/nowhere/a.svg'"),
        (
            ["bench", "--csv", "/proc/a.csv"],
            "expected a file that can be written, found '/proc/a.csv': No such file or",
        ),
        (["bench", "--json", "a" * 300], "expected a file that can be written, found 'aaa"),
        (["bench", "--plot", f"{'a' * 300}.png"], ": File name too long"),
        (["bench", "--threads", "99999"], f"expected at most {16 * os.cpu_count()} threads on {os.cpu_count()} cores"),
        (["inspect", "/nowhere", "--out", __file__], f"expected a folder, found the file '{__file__}'"),
        (["inspect", "/nowhere", "--out", f"{__file__}/a"], f"found '{__file__}/a': Not a directory"),
        (["inspect", "/nowhere", "--out", "/proc/a/b"], "expected a folder that can be written, found '/proc/a/b': No"),
        (["explain", "/nowhere", "--tokens", "0"], "expected a positive whole number, found 0"),
        (["inspect", "/nowhere", "--out", "folder", "--tokens", "-5"], "expected a positive whole number, found -5"),
        ([], "the following arguments are required: command"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, calls, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_files_to_write_are_opened_and_left_as_they_are(tmp_path):
    kept, new, link, pipe = (tmp_path / name for name in ("kept", "new", "link", "pipe"))
    kept.write_text("as before")
    link.symlink_to(tmp_path / "elsewhere")
    os.mkfifo(pipe)  # to open it would wait for a reader
    assert [file(str(path)) for path in (kept, new, link, pipe)] == [kept, new, link, pipe]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "link", "pipe"]
    assert kept.read_text() == "as before"


def test_as_many_threads_as_are_of_any_use(calls, monkeypatch):
    threads = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    cli.main(["bench", "--modes", "eager", "--threads", str(16 * os.cpu_count())])
    assert threads == [16 * os.cpu_count()]


@pytest.mark.slow
def test_a_reader_that_reads_nothing_ends_a_command_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mla_compile.cli", "memory", TINY]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (cli.CLOSED_PIPE, b"")


def test_a_reader_that_reads_a_line_ends_a_command_quietly():
    """Of 163 KB, more than a pipe holds."""
    rates = "--memory 1GiB --bandwidth 1TB/s --flops 1T --link 1GB/s,1us"
    command = [sys.executable, "-m", "mla_compile.cli", *f"layout {TINY} --gpus 1024 --batch 64 --json {rates}".split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout.readline() == b"{\n"
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == cli.CLOSED_PIPE


def test_another_error_of_the_system_is_one_line(monkeypatch, capsys):
    def without_room(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "run", without_room)
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err == "mla-compile: [Errno 28] No space left on device\n"


def test_a_missing_extra_is_one_line(monkeypatch, capsys):
    def without_transformers(*_):
        raise ImportError("the benchmark needs transformers: pip install 'mla-compile[hf]'")

    monkeypatch.setattr(run, "run", without_transformers)
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err == "mla-compile: the benchmark needs transformers: pip install 'mla-compile[hf]'\n"


def test_plot_is_refused_before_anything_is_measured(calls, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["bench", "--plot", "times.png"]) == 2
    assert calls == []
    assert "pip install 'mla-compile[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["explain"], ["inspect", "--out", "folder"]], ids=lambda command: command[0])
@pytest.mark.parametrize("name", ["none", "config.json"])
def test_a_folder_that_is_not_there_is_one_line(command, name, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert cli.main([*command, f"{tmp_path}/{name}"]) == 2
    assert capsys.readouterr().err.startswith("mla-compile: expected the folder of a model, or its name on the hub,")


def test_commands_register_themselves():
    assert command in cli.COMMANDS


def test_explain_says_what_became_of_a_checkpoint(config, capsys):
    """With one of its layers; tests/test_docs.py runs the command on the whole checkpoint."""
    layers = 1
    smaller = config(**json.loads((TINY / "config.json").read_text()) | {"num_hidden_layers": layers})
    (smaller / "model.safetensors").symlink_to(TINY / "model.safetensors")
    assert cli.main(["explain", str(smaller), "--tokens", "8", "--json"]) == 0
    report = Report.from_json(capsys.readouterr().out)
    assert [site.path for site in report.sites] == ["chunked"] * layers + ["absorbed"] * layers


@pytest.mark.parametrize("command", [["explain"], ["inspect", "--out", "folder"]], ids=lambda command: command[0])
@pytest.mark.parametrize(
    "fields", [{"model_type": "unheard_of"}, {"model_type": "t5"}, {"num_hidden_layers": "5"}], ids=str
)
def test_a_model_that_does_not_load_is_one_line(command, fields, config, capsys):
    """With status 2: 1 says that an attention stays unchanged."""
    pytest.importorskip("transformers")
    folder = config(**json.loads((TINY / "config.json").read_text()) | fields)
    assert cli.main([*command, str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mla-compile: expected a causal language model of transformers in {folder}, found: ")
    assert len(line) < 500


@pytest.mark.parametrize("command", [["explain"], ["inspect", "--out", "folder"]], ids=lambda command: command[0])
def test_a_model_that_does_not_run_is_one_line(command, config, capsys):
    pytest.importorskip("transformers")
    fields = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_experts_per_tok": 9}
    folder = config(**json.loads((TINY / "config.json").read_text()) | fields)
    (folder / "model.safetensors").symlink_to(TINY / "model.safetensors")
    assert cli.main([*command, str(folder)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("mla-compile: expected a model that reads ")
    assert "k out of range" in line
