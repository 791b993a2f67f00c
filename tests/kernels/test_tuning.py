"""Tiles chosen by timing, with timers of the tests' own and launches that are recorded instead of made."""

import contextlib
import json

import pytest
import torch

pytest.importorskip("triton")

from mla_compile.asked import kept_to
from mla_compile.kernels._common import tuning
from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels._common.tiles import Tiles, choose, fits
from mla_compile.kernels._common.tuning import neighbours, tuned
from mla_compile.kernels.expanded_attention import tiles as chunk_tiles

from .test_no_sync import chunks, decode, rows

MACHINE = Machine("sm_90", 132)
DEFAULT, FAST, SLOW = Tiles(16, 64, 8, 2), Tiles(16, 32, 8, 2), Tiles(16, 128, 8, 2)
RESULTS = torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([0.0, -torch.inf])
SECONDS = {DEFAULT: 2.0, FAST: 1.0, SLOW: 3.0}
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")


@pytest.fixture(autouse=True)
def new_process(monkeypatch, tmp_path):
    """Begin with no known tiles, on disk or in memory; the value is a function that forgets those in memory."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_KNOWN", {})
    return lambda: monkeypatch.setattr(tuning, "_KNOWN", {})


class Timed:
    """A timer that is told how long some tiles take, and records which it was asked to time."""

    def __init__(self, seconds):
        self.seconds, self.asked, self.latest = seconds, [], None

    def run(self, tiles):
        self.latest = tiles
        return RESULTS

    def __call__(self, call):
        call()
        self.asked.append(self.latest)
        seconds = self.seconds[self.latest]
        if isinstance(seconds, Exception):
            raise seconds
        return seconds


def best(timed, problem=("a problem", 1), machine=MACHINE):
    with tuning.tuning(timed):
        return tuned(machine, problem, DEFAULT, lambda: [FAST, SLOW], timed.run)


def test_the_fastest_is_taken_and_timed_once():
    timed = Timed(SECONDS)
    assert best(timed) == FAST
    assert timed.asked == [DEFAULT, FAST, SLOW]
    assert best(timed) == FAST
    assert len(timed.asked) == 3


def test_another_problem_and_another_machine_are_timed_again():
    timed = Timed(SECONDS)
    best(timed)
    best(timed, ("a problem", 2))
    best(timed, machine=Machine("sm_90", 78))
    assert len(timed.asked) == 9


def test_a_second_process_reads_what_the_first_found(new_process, tmp_path):
    best(Timed(SECONDS))
    new_process()
    timed = Timed({})
    assert best(timed) == FAST
    assert timed.asked == []
    (path,) = tmp_path.glob("mla_compile/tiles-sm_90-132-*.json")
    assert json.loads(path.read_text()) == {"a problem 1": [16, 32, 8, 2]}


@pytest.mark.parametrize("content", ["", "[]", '{"a problem 1": [1]}', '{"a problem 1": null}'])
def test_a_broken_file_is_made_again(new_process, tmp_path, content):
    best(Timed(SECONDS))
    (path,) = tmp_path.glob("mla_compile/*.json")
    path.write_text(content)
    new_process()
    timed = Timed(SECONDS)
    assert best(timed) == FAST
    assert len(timed.asked) == 3
    assert "a problem 1" in json.loads(path.read_text())


def test_what_does_not_compile_is_left_out():
    from triton.runtime.errors import OutOfResources

    error = OutOfResources(300, 200, "shared memory")
    assert best(Timed(SECONDS | {FAST: error})) == DEFAULT
    assert best(Timed(dict.fromkeys(SECONDS, error)), ("another", 1)) == DEFAULT


def test_what_a_pass_of_the_compiler_fails_on_is_left_out():
    assert best(Timed(SECONDS | {FAST: RuntimeError("PassManager::run failed")})) == DEFAULT


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("an illegal memory access"), MemoryError()])
def test_other_errors_are_raised(error):
    with pytest.raises(type(error)):
        best(Timed(SECONDS | {FAST: error}))


WRONG = {
    "o": (RESULTS[0] + torch.tensor([0, 0, 0.05]).bfloat16(), RESULTS[1]),
    "o that is not a number": (RESULTS[0] * torch.nan, RESULTS[1]),
    "lse": (RESULTS[0], torch.tensor([0.03, -torch.inf])),
    "a row that sees keys": (RESULTS[0], torch.tensor([0.0, torch.inf])),
    "dtype": (RESULTS[0].float(), RESULTS[1]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_computes_something_else_is_not_taken_however_fast(wrong, caplog):
    class Wrong(Timed):
        def run(self, tiles):
            return wrong if tiles == FAST else super().run(tiles)

    assert best(Wrong(SECONDS)) == DEFAULT
    assert f"{FAST} gives " in caplog.text


@pytest.mark.parametrize(("dtype", "off"), [(torch.bfloat16, 2**-7), (torch.float32, 1e-5)])
def test_what_rounds_otherwise_is_taken(dtype, off):
    class Rounded(Timed):
        def run(self, tiles):
            o, lse = super().run(tiles)
            return (o.to(dtype) * (1 + off), lse + 1e-5) if tiles == FAST else (o.to(dtype), lse)

    assert best(Rounded(SECONDS)) == FAST


def test_nothing_is_timed_without_tuning():
    timed = Timed({})
    assert tuned(MACHINE, ("a problem", 1), DEFAULT, lambda: [FAST], timed.run) == DEFAULT


def test_nothing_is_timed_during_a_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert best(Timed({})) == DEFAULT
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert best(Timed(SECONDS)) == FAST


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("heads", [16, 128])
def test_candidates_fit_the_machine(arch, heads):
    machine = Machine(arch, 100)
    default = choose(machine, heads, 512, 64, 2, False)
    found = neighbours(default, lambda tiles: fits(machine, tiles, 512, 64, 2))
    assert 2 <= len(set(found)) == len(found) <= 24
    assert default not in found
    for tiles in found:
        assert (tiles.rows + tiles.keys * max(tiles.stages - 1, 1)) * 576 * 2 <= machine.shared_bytes
        assert tiles.rows * 512 / (32 * tiles.warps) <= 128  # registers of a thread that hold sums
        assert min(tiles.rows, tiles.keys) >= 16
    default = chunk_tiles.choose(machine, 128, 64, 128, 2)
    found = neighbours(default, lambda tiles: chunk_tiles.fits(machine, tiles, 128, 64, 128, 2))
    assert len(found) >= 3
    assert all((t.rows * 192 + t.keys * t.stages * 320) * 2 <= machine.shared_bytes for t in found)


def test_candidates_for_hopper():
    """Choices that estimates leave open: a few large tiles of keys or several small ones in flight, 4 warps or 8."""

    def found(heads):
        default = choose(MACHINE, heads, 512, 64, 2, False)
        return {default, *neighbours(default, lambda tiles: fits(MACHINE, tiles, 512, 64, 2))}

    assert found(128) >= {Tiles(64, 64, 8, 2), *(Tiles(64, 32, 8, stages) for stages in (1, 2, 3, 4))}
    assert found(16) >= {Tiles(16, 64, 8, 3), Tiles(16, 32, 8, 4), Tiles(16, 32, 4, 4), Tiles(16, 128, 8, 2)}


@pytest.fixture
def without_results(monkeypatch):
    """Nothing is compared: recorded launches have no results."""
    monkeypatch.setattr(tuning, "difference", lambda *_: None)


class Greedy:
    """A timer that reports the number of keys of a tile as the time, so that the smallest tile is the fastest."""

    def __init__(self, launches):
        self.launches, self.calls = launches, 0

    def __call__(self, call):
        call()
        self.calls += 1
        return next(each.constants["KEYS"] for each in reversed(self.launches) if "ROWS" in each.constants)


@pytest.mark.usefixtures("without_results")
@pytest.mark.parametrize("call", [decode, rows, chunks], ids=["pages", "rows", "chunks"])
def test_launches_take_what_was_found(launches, call):
    call()
    usual = launches[-1 if call is not decode else 0].constants["KEYS"]
    launches.clear()
    greedy = Greedy(launches)
    with kept_to("triton"), tuning.tuning(greedy):
        call()
    assert greedy.calls > 3
    launches.clear()
    with kept_to("triton"), tuning.tuning(greedy):
        call()
    taken = {launch.constants["KEYS"] for launch in launches}
    assert len(taken) == 1
    assert taken.pop() < usual
    launches.clear()
    call()
    assert {launch.constants["KEYS"] for launch in launches} == {usual}


@pytest.mark.usefixtures("without_results")
def test_fixed_parts_are_never_tuned(launches):
    greedy = Greedy(launches)
    with tuning.tuning(greedy):
        decode(split_tokens=256)
    assert greedy.calls == 0


@pytest.mark.usefixtures("without_results")
def test_lengths_of_one_power_of_two_are_one_problem(launches):
    greedy = Greedy(launches)
    with tuning.tuning(greedy):
        decode(batch=3)
        calls = greedy.calls
        decode(batch=4)
        assert greedy.calls == calls
        decode(batch=5)
        assert greedy.calls == 2 * calls


@pytest.mark.parametrize(("mode", "expected"), [("max-autotune", True), ("default", False), (None, False)])
def test_the_mode_turns_tuning_on(monkeypatch, mode, expected):
    from mla_compile import backend
    from mla_compile.inductor import codegen

    entered = []

    @contextlib.contextmanager
    def noted():
        entered.append(True)
        yield

    monkeypatch.setattr(backend, "tuning", noted)
    monkeypatch.setattr(codegen, "compile_fx", lambda module, inputs, **kwargs: module.forward)
    compiled = torch.compile(lambda x: x * 2 + 1, backend="mla", mode=mode)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
    assert bool(entered) == expected


def test_candidates_for_blackwell():
    """Sums of 64 rows go to tensor memory, which has 512 columns."""
    machine = Machine("sm_100", 148)
    for rank, keys in ((512, ()), (384, (16, 32, 64, 128)), (256, (16, 32, 64, 128))):
        found = [of for of in (16, 32, 64, 128) if fits(machine, Tiles(64, of, 8, 1), rank, 64, 2)]
        assert found == list(keys)
    assert fits(machine, Tiles(32, 32, 8, 3), 512, 64, 2)  # sums in registers
