"""A flag of `bench` that the run would not read is an error of the parser, before anything is measured."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from mla_compile.bench import command, flags
from mla_compile.bench.flags import RUNS
from mla_compile.cli import main

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    "--json": "--json a.json",
    "--csv": "--csv a.csv",
    "--plot": "--plot a.png",
    "--layer": "--layer v2-lite",
    "--dtype": "--dtype float32",
    "--modes": "--modes mla",
    "--cache": "--cache dynamic",
    "--repeats": "--repeats 10",
    "--threads": "--threads 1",
    "--train": "--train 8",
    "--model": "--model v2-lite",
    "--layers": "--layers 4",
    "--caches": "--caches static",
    "--vllm": "--vllm",
    "--contexts": "--contexts 64",
    "--prefill": "--prefill 64",
    "--batches": "--batches 1",
    "--kernels": "--kernels decode",
    "--heads": "--heads 16",
    "--queries": "--queries 1",
    "--dtypes": "--dtypes bf16",
    "--peers": "--peers mla",
    "--quick": "--quick",
    "--workspace-tokens": "--workspace-tokens 1024",
    "--max-autotune": "--max-autotune",
}
"""Each flag with a value, its default where it has one: to be given is what counts."""
OF_GPUS = {
    "--kernels",
    "--heads",
    "--queries",
    "--dtypes",
    "--peers",
    "--quick",
    "--workspace-tokens",
    "--max-autotune",
}
OF_MODELS = {"--layers", "--caches", "--vllm"}
OF_CPUS = {"--train", "--model", "--layer", "--dtype", "--modes", "--cache", "--repeats", "--threads"}
CASES = {"--contexts", "--prefill", "--batches"}
NOT_READ = {
    "": OF_GPUS | OF_MODELS | {"--batches"},
    "--train 8": OF_GPUS | OF_MODELS | CASES | {"--csv", "--plot", "--modes", "--cache"},
    "--model v2-lite": OF_GPUS | {"--train", "--layer", "--cache"},
    "--device cuda": OF_CPUS | OF_MODELS,
    "--device cuda --quick": OF_CPUS | OF_MODELS | CASES,
}
"""For each run, by what asks for it, the flags that it does not read."""


@pytest.fixture
def measured(monkeypatch):
    """What would have been measured, in place of the runs: the flags that each was given."""
    seen = []
    for name in ("_run_layer", "_run_training", "_run_generation", "_run_kernels"):
        monkeypatch.setattr(command, name, lambda arguments: seen.append(arguments) or 0)
    return seen


def parser():
    subparsers = argparse.ArgumentParser().add_subparsers()
    command.add_parser(subparsers)
    return subparsers.choices["bench"]


@pytest.mark.parametrize(
    ("asked", "flag"), [(asked, flag) for asked, others in NOT_READ.items() for flag in sorted(others)]
)
def test_a_flag_that_is_not_read_is_refused(asked, flag, measured, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *asked.split(), *EXAMPLES[flag].split()])
    assert measured == []
    assert f"found {flag}\n" in capsys.readouterr().err


@pytest.mark.parametrize("asked", NOT_READ)
def test_all_others_are_read(asked, measured):
    """Each by itself: some flags ask for another run."""
    asks = {"--train", "--model", "--quick"}
    for flag in EXAMPLES.keys() - NOT_READ[asked] - asks:
        assert main(["bench", *asked.split(), *EXAMPLES[flag].split()]) == 0
        assert getattr(measured.pop(), flag[2:].replace("-", "_")) is not None


def test_the_error_names_what_is_read_and_all_that_is_not(measured, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--train", "8", "--csv", "a.csv", "--modes", "mla"])
    assert capsys.readouterr().err.endswith(
        "--train: expected only flags that are read there "
        "(--device, --json, --dtype, --repeats, --threads, --train, --layer), found --modes, --csv\n"
    )


@pytest.mark.parametrize(
    ("asked", "contexts", "prefill"),
    [
        ("", (1024, 4096, 16384, 32768), (1024, 4096)),
        ("--model v2-lite", (4096, 16384, 32768), (1024, 8192)),
        ("--device cuda", (1024, 8192, 32768, 131072), (1024, 4096, 16384)),
        ("--prefill 7", (1024, 4096, 16384, 32768), [7]),
        ("--contexts --prefill 7", [], [7]),
    ],
)
def test_defaults_are_those_of_the_run(asked, contexts, prefill, measured):
    main(["bench", *asked.split()])
    (found,) = measured
    assert (found.contexts, found.prefill) == (contexts, prefill)


def test_the_table_has_every_flag_and_only_the_table_has_defaults():
    actions = [action for action in parser()._actions if action.dest != "help"]
    assert {action.dest for action in actions} == flags.FLAGS == {name for run in RUNS for name in run.reads}
    assert {action.default for action in actions} == {None}
    assert {action.option_strings[0] for action in actions} == {*EXAMPLES, "--device"}


def commands():
    """Every `mla-compile bench` of the documentation, in a block or in a line."""
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        text = page.read_text()
        for found in re.finditer(r"^mla-compile bench( .*)?$|`mla-compile bench( [^`]*)?`", text, re.MULTILINE):
            yield shlex.split(found[1] or found[2] or "")


def test_documented_commands_give_only_flags_that_are_read(measured):
    documented = list(commands())
    assert len(documented) > 10
    for arguments in documented:
        assert main(["bench", *arguments]) == 0
