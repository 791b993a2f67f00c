"""The benchmark on tiny layers: what it runs is right, what it reports has its form. No test looks at a time."""

import csv
import json
import math
import subprocess
from dataclasses import replace
from io import StringIO

import pytest
import torch

from mla_compile.bench import check, memory, modes, run, table
from mla_compile.bench.breakdown import break_down
from mla_compile.bench.layers import LAYERS, Layer, build
from mla_compile.bench.measure import Result, measure
from mla_compile.bench.peers import absorbed_by_hand
from mla_compile.bench.plot import plot
from mla_compile.bench.run import Benchmark
from mla_compile.bench.workloads import Workload, limit, make_inputs
from mla_compile.cache.argument import cache_of
from mla_compile.cost import Device
from mla_compile.passes.outcome import Outcome
from mla_compile.report import Report

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("imports_frozen")

SIZES = {"hidden": 64, "N": 4, "L": 32, "P": 16, "R": 8, "V": 12}
TINY = {
    "v2": Layer("tiny-v2", "deepseek_v2", Lq=None, **SIZES),
    "v3": Layer("tiny-v3", "deepseek_v3", Lq=24, **SIZES),
}
DECODE, PREFILL = Workload("decode", 37), Workload("prefill", 19)
DEVICE = Device("a computer", 1e11, 1e10)


@pytest.fixture(scope="module", params=TINY)
def built(request):
    return build(TINY[request.param])


def outputs(built, workload, cache_kind, dtype, step):
    arguments = make_inputs(built, workload, cache_kind, dtype).arguments()
    output = step(arguments)
    cached = cache_of(arguments).layers[0]
    return output, cached.keys, cached.values


class TestLayers:
    def test_the_named_layers_are_those_of_the_models(self):
        assert LAYERS["v2-lite"] == Layer("v2-lite", "deepseek_v2", 2048, 16, None, 512, 128, 64, 128)
        assert LAYERS["v3"] == Layer("v3", "deepseek_v3", 7168, 128, 1536, 512, 128, 64, 128)

    def test_it_is_the_module_of_transformers(self, built):
        kind = type(built.attention)
        assert kind.__module__ == f"transformers.models.{built.layer.model_type}.modeling_{built.layer.model_type}"
        assert built.attention.kv_b_proj.weight.shape == (4 * (16 + 12), 32)
        assert built.config._attn_implementation == "sdpa"

    def test_weights_are_filled_and_the_same_each_time(self, built):
        again = build(built.layer)
        for (name, weight), other in zip(built.attention.named_parameters(), again.attention.parameters(), strict=True):
            assert torch.equal(weight, other)
            assert weight.count_nonzero() == weight.numel(), name
            assert not weight.requires_grad


class TestWorkloads:
    @pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
    @pytest.mark.parametrize("workload", [DECODE, PREFILL], ids=str)
    def test_every_call_sees_the_same_context(self, built, workload, cache_kind):
        inputs = make_inputs(built, workload, cache_kind)
        lengths, results = [], []
        for _ in range(2):
            arguments = inputs.arguments()
            lengths.append(int(cache_of(arguments).get_seq_length()))
            results.append(built.attention(**arguments)[0])
        assert lengths == [workload.context] * 2
        assert torch.equal(*results)

    def test_random_numbers_do_not_depend_on_the_dtype(self, built):
        single, double = (make_inputs(built, DECODE, "dynamic", dtype) for dtype in (torch.float32, torch.float64))
        assert torch.equal(single.hidden_states.double(), double.hidden_states)

    def test_inputs_are_rounded_to_the_dtype_of_the_layer(self):
        built = build(replace(TINY["v3"], dtype="bfloat16"))
        half, double = (make_inputs(built, DECODE, "dynamic", dtype) for dtype in (None, torch.float64))
        assert half.hidden_states.dtype == torch.bfloat16
        assert torch.equal(half.hidden_states.double(), double.hidden_states)

    def test_limit_counts_each_byte_once_and_all_flops(self):
        built = build(TINY["v3"])
        matrices = 64 * 24 + 24 * 4 * 24 + 64 * 40 + 32 * 4 * 28 + 4 * 12 * 64
        elements = matrices + 24 + 32 + 38 * 40 + 2 * 64
        slow_memory, slow_compute = Device("m", 1e30, 1.0), Device("c", 1.0, 1e30)
        assert limit(built.attention, built.layer, DECODE, slow_memory) == 4 * elements
        absorbing = 4 * (32 * 28 + 38 * (2 * 32 + 8))
        projections = matrices - 32 * 4 * 28
        assert limit(built.attention, built.layer, DECODE, slow_compute) == 2 * (absorbing + projections)
        expanding = 4 * (19 * 32 * 28 + 19 * 20 // 2 * (16 + 8 + 12))
        assert limit(built.attention, built.layer, PREFILL, slow_compute) == 2 * (expanding + 19 * projections)


@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
@pytest.mark.parametrize("workload", [DECODE, PREFILL], ids=str)
def test_by_hand_is_transformers_in_float64(built, workload, cache_kind):
    exact = replace(built, attention=build(built.layer).attention.double())
    eager = outputs(exact, workload, cache_kind, torch.float64, lambda a: exact.attention(**a)[0])
    by_hand = outputs(exact, workload, cache_kind, torch.float64, lambda a: absorbed_by_hand(exact.attention, a))
    for found, expected in zip(by_hand, eager, strict=True):
        assert found.shape == expected.shape
        # V2's rope is computed in fp32 whatever the dtype is, here by the same function.
        assert (found - expected).abs().max() <= 1e-13 * expected.abs().max()


class TestCheck:
    def test_right_modes_are_within_the_tolerance(self, built):
        for workload in (DECODE, PREFILL):
            exact = check.reference(built, workload, "dynamic")
            for mode in ("eager", "by-hand"):
                error = check.error(modes.MODES[mode](built), built, workload, "dynamic", exact)
                assert 0 < error < check.tolerance(built, workload, "dynamic", exact)

    @pytest.mark.slow
    @pytest.mark.parametrize("workload", [DECODE, PREFILL], ids=str)
    def test_half_precision_is_measured_by_transformers_own_error(self, workload):
        built = build(replace(TINY["v3"], dtype="bfloat16"))
        assert {weight.dtype for weight in built.attention.parameters()} == {torch.bfloat16}
        exact = check.reference(built, workload, "dynamic")
        allowed = check.tolerance(built, workload, "dynamic", exact)
        # A few roundings, which are far less than what sums in bfloat16 would lose.
        assert torch.finfo(torch.bfloat16).eps <= allowed < 0.1
        eager, by_hand, mla = measure(built, workload, "dynamic", ["eager", "by-hand", "mla"], repeats=1)
        assert [result.status for result in (eager, by_hand, mla)] == ["ok"] * 3
        assert 0 < mla.error < allowed

    @pytest.mark.parametrize(
        "spoil",
        [
            pytest.param(lambda out, cache: out + 1e-3 * out.abs().max(), id="output"),
            pytest.param(lambda out, cache: out * math.nan, id="nan"),
            pytest.param(lambda out, cache: out[:, :, :-1], id="shape"),
            pytest.param(lambda out, cache: cache.keys[:, :, -1].zero_() is None or out, id="latent not written"),
            pytest.param(lambda out, cache: cache.values[:, :, -1].zero_() is None or out, id="rope key not written"),
        ],
    )
    def test_a_wrong_output_or_cache_gets_no_time(self, monkeypatch, spoil):
        built = build(TINY["v3"])

        def wrong(built):
            def step(arguments):
                out = built.attention(**arguments)[0]
                return spoil(out, cache_of(arguments).layers[0])

            return step

        monkeypatch.setitem(modes.MODES, "inductor", wrong)
        right, spoiled = measure(built, DECODE, "dynamic", ["eager", "inductor"], repeats=2)
        assert (right.status, spoiled.status) == ("ok", "wrong")
        assert spoiled.seconds == ()
        assert "away from float64, rounding explains at most" in spoiled.note


class TestMeasure:
    @pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
    def test_each_mode_has_a_time_for_each_repeat(self, built, cache_kind):
        results = measure(built, DECODE, cache_kind, ["eager", "by-hand"], repeats=3)
        assert [r.mode for r in results] == ["eager", "by-hand"]
        for result in results:
            assert result.status == "ok"
            assert len(result.seconds) == 3
            assert min(result.seconds) <= result.quartiles[0] <= result.median <= result.quartiles[1]

    def test_a_compiled_mode_is_not_compiled_again_while_timed(self, monkeypatch):
        compiled = []

        def backend(graph, inputs):
            compiled.append(graph)
            return graph.forward

        monkeypatch.setitem(modes.MODES, "inductor", modes._compiled(backend))
        (result,) = measure(build(TINY["v3"]), DECODE, "dynamic", ["inductor"], repeats=4)
        assert result.status == "ok"
        assert len(compiled) == 2, "one graph for the first length, one for any length"

    def test_a_mode_that_raises_is_reported(self, monkeypatch):
        def broken(built):
            raise RuntimeError("no such kernel\nhint")

        monkeypatch.setitem(modes.MODES, "inductor", broken)
        failed, right = measure(build(TINY["v3"]), PREFILL, "dynamic", ["inductor", "eager"], repeats=1)
        assert (failed.status, failed.note) == ("failed", "RuntimeError: no such kernel hint")
        assert right.status == "ok"
        assert right.quartiles is None

    def test_a_mode_that_will_not_fit_is_skipped_with_a_sentence(self, monkeypatch):
        monkeypatch.setattr(memory, "available_bytes", lambda: 2**20)
        monkeypatch.setattr("mla_compile.bench.measure.needed_bytes", lambda *_: 5 * 2**29)
        (result,) = measure(build(TINY["v3"]), DECODE, "dynamic", ["eager"], repeats=1)
        assert result.status == "skipped"
        assert result.note == "needs about 2.5 GiB, 0.0 GiB are available"

    def test_without_memory_for_the_check_there_is_no_time(self, monkeypatch):
        monkeypatch.setattr(check, "available_bytes", lambda: 2**10)
        (result,) = measure(build(TINY["v3"]), DECODE, "dynamic", ["eager"], repeats=1)
        assert (result.status, result.seconds) == ("skipped", ())
        assert result.note == "there is not enough memory to check the output against float64"

    def test_what_the_mla_backend_did_is_noted(self, monkeypatch):
        sites = [
            Outcome("sdpa", "", "", "absorbed", "fewest bytes"),
            Outcome("sdpa_1", "", "", "unchanged", "keys have no latent"),
        ]
        monkeypatch.setattr("mla_compile.report.last_report", lambda: Report(tuple(sites)))
        monkeypatch.setitem(modes.MODES, "mla", modes.MODES["eager"])
        (result,) = measure(build(TINY["v3"]), DECODE, "dynamic", ["mla"], repeats=1)
        assert result.note == "absorbed, unchanged: keys have no latent"


class TestMemory:
    def test_what_a_call_takes_and_gives_back_is_seen(self):
        grown = memory.peak_growth(lambda: torch.ones(64 * 2**20, dtype=torch.uint8))
        if grown is None:
            pytest.skip("this system has no /proc/self/clear_refs to write to")
        assert 63 * 2**20 < grown < 96 * 2**20

    def test_where_the_system_cannot_tell_there_is_no_number(self, monkeypatch):
        def unreadable(path, field):
            raise OSError

        monkeypatch.setattr(memory, "_kib", unreadable)
        assert memory.peak_growth(lambda: None) is None
        assert memory.available_bytes() is None

    def test_naive_modes_need_memory_for_every_head(self):
        layer = LAYERS["v2-lite"]
        decode, prefill = Workload("decode", 4096), Workload("prefill", 4096)
        measured_mib = {
            ("eager", decode): 160,
            ("eager", prefill): 2658,
            ("by-hand", decode): 8,
            ("by-hand", prefill): 500,
        }
        for (mode, workload), mib in measured_mib.items():
            assert 0.95 < memory.needed_bytes(layer, workload, mode) / 2**20 / mib < 1.3

    def test_a_process_of_its_own_answers_for_each_workload(self):
        found = memory.peaks(TINY["v3"], "by-hand", [DECODE, PREFILL], "dynamic", threads=1)
        assert len(found) == 2
        assert all(amount is None or 0 <= amount < 2**28 for amount in found)

    def test_a_process_that_fails_leaves_no_numbers_and_says_why(self, monkeypatch, capsys):
        killed = subprocess.CompletedProcess([], -9, stdout='1048576\n"ValueError: no"\n', stderr="loading\nkilled\n")
        monkeypatch.setattr(memory.subprocess, "run", lambda *_, **__: killed)
        assert memory.peaks(TINY["v3"], "eager", [DECODE, PREFILL, DECODE], "dynamic", 1) == [2**20, None, None]
        assert capsys.readouterr().err.splitlines() == [
            "memory of eager: ValueError: no",
            "memory of eager: the process ended with -9: ['killed']",
        ]


def test_breakdown_has_every_stage():
    found = break_down(build(TINY["v3"]), DECODE, "static", repeats=2)
    assert list(found.stages) == [
        "projections, norms, rope",
        "cache update",
        "absorb W_UK",
        "attention",
        "W_UV",
        "output projection",
    ]
    assert all(seconds > 0 for seconds in [*found.stages.values(), found.whole])


@pytest.fixture(scope="module")
def benchmark_report():
    """A run of the tiny layer, without the processes that measure memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "peaks", lambda layer, mode, workloads, *_: [3 * 2**20] * len(workloads))
        patch.setattr(run, "measure_device", lambda *_: DEVICE)
        return run.run(TINY["v3"], [DECODE, PREFILL], ["eager", "by-hand"], "dynamic", repeats=2)


class TestReport:
    def test_a_run_has_a_result_for_each_mode_and_workload(self, benchmark_report):
        found = [(r.workload, r.mode, r.status) for r in benchmark_report.results]
        assert found == [(w, m, "ok") for w in (DECODE, PREFILL) for m in ("eager", "by-hand")]
        assert all(r.peak_bytes == 3 * 2**20 for r in benchmark_report.results)
        assert list(benchmark_report.limits) == [DECODE, PREFILL]
        assert [b.workload for b in benchmark_report.breakdowns] == [DECODE, PREFILL]

    def test_rows(self):
        results = [
            Result("inductor", DECODE, "ok", "", (0.003, 0.004, 0.005), 1e-7, 2**20),
            Result("mla", DECODE, "ok", "absorbed", (0.002, 0.002, 0.002), 1e-7, None),
            Result("eager", DECODE, "wrong", "is 1.0e-03 off", (), 1e-3),
        ]
        inductor, mla, eager = table.rows(Benchmark(TINY["v3"], "dynamic", DEVICE, 0.0, {DECODE: 0.001}, results, []))
        assert (inductor["ms"], inductor["times_limit"], inductor["speed_up"], inductor["peak_mib"]) == (4, 4, 1, 1)
        assert (inductor["ms_first_quartile"], inductor["ms_third_quartile"]) == pytest.approx((3.5, 4.5))
        assert (mla["times_limit"], mla["speed_up"], mla["peak_mib"], mla["note"]) == (2, 2, None, "absorbed")
        assert (eager["ms"], eager["times_limit"], eager["speed_up"]) == (None, None, None)

    def test_no_speed_up_over_a_wrong_result(self):
        results = [Result("inductor", DECODE, "wrong"), Result("eager", DECODE, "ok", "", (0.002,), 1e-7)]
        report = Benchmark(TINY["v3"], "dynamic", DEVICE, 0.0, {DECODE: 0.001}, results, [])
        assert table.rows(report)[1]["speed_up"] is None

    def test_csv_and_json_hold_the_rows(self, benchmark_report):
        expected = table.rows(benchmark_report)
        read = list(csv.DictReader(StringIO(table.as_csv(benchmark_report))))
        assert [(row["mode"], row["workload"], float(row["ms"])) for row in read] == [
            (row["mode"], row["workload"], row["ms"]) for row in expected
        ]
        document = json.loads(table.as_json(benchmark_report))
        assert document["device"]["name"] == "a computer"
        assert [row["seconds"] for row in document["rows"]] == [list(r.seconds) for r in benchmark_report.results]
        assert len(document["breakdowns"]) == 2

    def test_text_names_machine_limits_modes_and_stages(self, benchmark_report):
        text = table.as_text(benchmark_report)
        assert text.startswith("a computer: GEMM 100 GFLOP/s, copy 10 GB/s")
        assert "decode at context 37: limit" in text
        assert "prefill of 19 tokens: limit" in text
        assert "absorb W_UK" in text
        assert all(len(line) == len(line.rstrip()) for line in text.splitlines())

    def test_a_mode_without_time_says_why(self):
        results = [Result("eager", DECODE, "skipped", "needs about 90.0 GiB, 2.0 GiB are available")]
        text = table.as_text(Benchmark(TINY["v3"], "dynamic", DEVICE, 0.0, {DECODE: 0.001}, results, []))
        assert "skipped: needs about 90.0 GiB, 2.0 GiB are available" in text

    def test_plot_writes_a_picture(self, benchmark_report, tmp_path):
        pytest.importorskip("matplotlib")
        plot(benchmark_report, tmp_path / "times.png")
        assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")

    def test_plot_without_matplotlib_names_the_extra(self, benchmark_report, tmp_path, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"--plot needs matplotlib: pip install 'mla-compile\[plot\]'"):
            plot(benchmark_report, tmp_path / "times.png")
