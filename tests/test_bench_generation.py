"""The benchmark of whole models, on tiny ones: what it runs is right, what it reports has its form."""

import copy
import csv
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from torch import nn

from mla_compile.bench import memory
from mla_compile.bench.generation import engine, models, table
from mla_compile.bench.generation import measure as measuring
from mla_compile.bench.generation.caches import CACHES
from mla_compile.bench.generation.measure import measure
from mla_compile.bench.generation.models import MODELS, WholeModel, build, limit
from mla_compile.bench.generation.plot import plot
from mla_compile.bench.generation.run import Generation, run
from mla_compile.bench.generation.ways import ENGINES, Batch, Result, Way
from mla_compile.bench.layers import Layer
from mla_compile.bench.workloads import Workload
from mla_compile.cli import main
from mla_compile.cost import Device

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("imports_frozen")

LAYER = Layer("tiny", "deepseek_v2", hidden=64, N=4, Lq=None, L=128, P=16, R=8, V=12)
TINY = WholeModel(LAYER, layers=2, intermediate=96, expert_intermediate=32, experts=2, shared_experts=1, vocabulary=128)
DECODE, PREFILL = Batch(2, Workload("decode", 37)), Batch(2, Workload("prefill", 19))
DEVICE = Device("a computer", 1e11, 1e10)
EAGER, STOCK, OURS = Way("eager", "dynamic"), Way("inductor", "dynamic"), Way("mla", "dynamic")


@pytest.fixture(scope="module")
def model():
    return build(TINY)


@pytest.fixture
def another(monkeypatch):
    """A function that puts a forward hook in the place of the compiler."""

    def install(hook):
        monkeypatch.setattr(nn.Module, "compile", lambda self, backend: self.register_forward_hook(hook))

    return install


class TestModels:
    def test_v2_lite_is_as_published_but_for_its_layers_and_experts(self):
        whole = MODELS["v2-lite"]
        assert (whole.layers, whole.intermediate, whole.expert_intermediate) == (27, 10944, 1408)
        assert (whole.experts, whole.shared_experts, whole.vocabulary) == (6, 2, 102400)

    def test_a_cut_model_has_its_share_of_the_vocabulary(self):
        whole = MODELS["v2-lite"].cut_to(4)
        assert whole == replace(MODELS["v2-lite"], layers=4, vocabulary=15168)
        assert TINY.cut_to(1).vocabulary == 64

    def test_it_is_transformers_own_and_takes_every_expert(self, model):
        assert type(model).__name__ == "DeepseekV2ForCausalLM"
        assert len(model.model.layers) == 2
        assert model.config.n_routed_experts == model.config.num_experts_per_tok == 2
        assert not any(weight.requires_grad for weight in model.parameters())
        again = build(TINY)
        assert all(map(torch.equal, model.parameters(), again.parameters()))

    def test_the_limit_counts_weights_and_latents_once(self, model):
        weights = sum(weight.numel() for weight in model.parameters()) - 128 * 64
        latents = 2 * 38 * 2 * (128 + 8)
        slow_memory = Device("a computer", 1e20, 1e9)
        assert limit(model, TINY, DECODE.workload, 2, slow_memory) == pytest.approx(
            4 * (weights + 2 * 64 + latents) / 1e9
        )

    def test_the_limit_counts_the_head_for_one_token_of_a_sequence(self, model):
        slow = Device("a computer", 1e9, 1e20)
        wider = replace(TINY, vocabulary=256)
        more = limit(build(wider), wider, PREFILL.workload, 2, slow) - limit(model, TINY, PREFILL.workload, 2, slow)
        assert more == pytest.approx(2 * 2 * 128 * 64 / 1e9)


@pytest.mark.parametrize("batch", [DECODE, pytest.param(PREFILL, marks=pytest.mark.slow)], ids=str)
def test_every_repeat_of_a_right_way_has_a_time(model, batch):
    (result,) = measure(model, TINY, [batch], [EAGER], 3)
    assert (result.way, result.batch, result.status) == (EAGER, batch, "ok")
    assert len(result.seconds) == 3
    assert min(result.seconds) > 0
    assert result.tokens_per_second > 0
    assert result.error < 1e-5


def test_a_prompt_in_parts_has_the_logits_of_the_whole(model):
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    for batch in (PREFILL, DECODE):
        whole, parts = (measuring._generate(exact, TINY, batch, "dynamic", 1, n).logits for n in (None, 7))
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-7)


def test_ours_is_right_and_says_what_became_of_the_attention(without_codegen):
    whole = TINY.cut_to(1)
    (result,) = measure(build(whole), whole, [DECODE], [OURS], 2)
    assert (result.status, result.note, len(result.seconds)) == ("ok", "absorbed", 2)
    assert result.error < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
def test_ours_with_each_cache(cache, without_codegen):
    narrow = replace(TINY, layer=replace(LAYER, L=32))  # a wider latent is not up-projected in chunks
    results = measure(build(narrow), narrow, [DECODE, PREFILL], [Way("mla", cache)], 2)
    assert [(result.status, result.note) for result in results] == [("ok", "2 absorbed"), ("ok", "2 chunked")]
    assert max(result.error for result in results) < {"fp8-pages": 0.2, "int8-pages": 0.02, "int4-pages": 0.5}.get(
        cache, 1e-5
    )


def test_wrong_logits_get_no_time(model, another):
    def negate(module, inputs, output):
        output.logits = -output.logits
        return output

    another(negate)
    (result,) = measure(model, TINY, [DECODE], [OURS], 3)
    assert (result.status, result.seconds) == ("wrong", ())
    assert result.error > 1
    assert "away from float64, rounding explains at most" in result.note


@pytest.mark.slow
def test_logits_that_are_no_numbers_are_wrong(model, another):
    def spoil(module, inputs, output):
        output.logits = output.logits * torch.nan
        return output

    another(spoil)
    assert measure(model, TINY, [DECODE], [OURS], 3)[0].status == "wrong"


def test_a_way_that_fails_says_so_and_the_others_go_on(model, another):
    def fail(module, inputs, output):
        raise RuntimeError("no such thing")

    another(fail)
    results = measure(model, TINY, [DECODE], [OURS, EAGER], 3)
    assert [result.status for result in results] == ["failed", "ok"]
    assert results[0].note == "RuntimeError: no such thing"


def test_what_does_not_fit_is_skipped(model, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 10_000_000)
    huge = Batch(10_000, DECODE.workload)
    results = measure(model, TINY, [huge], [EAGER], 3)
    assert [result.status for result in results] == ["skipped"]
    assert "10000" not in results[0].note
    assert "are available" in results[0].note
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    assert measure(model, TINY, [DECODE], [EAGER], 3)[0].note == (
        "there is not enough memory to check the logits against float64"
    )


@pytest.mark.slow
def test_a_slow_way_is_timed_for_fewer_steps(model, monkeypatch):
    monkeypatch.setattr(measuring, "SLOW_SECONDS", 0.0)
    (result,) = measure(model, TINY, [DECODE], [EAGER], 10)
    assert len(result.seconds) == 1


class TestEngine:
    """What surrounds vLLM's engine, without vLLM: `tests/vllm/test_bench.py` runs that."""

    WAYS = ENGINES

    def test_without_it_ways_are_skipped(self, model, monkeypatch):
        monkeypatch.setattr(engine, "find_spec", lambda name: None)
        results = measure(model, TINY, [DECODE], self.WAYS, 3)
        assert [(result.status, result.note) for result in results] == [("skipped", "vLLM is not installed")] * 2

    @pytest.fixture
    def answering(self, model, monkeypatch):
        """A stand-in for vLLM's process, whose log-probabilities are those of transformers plus `off`."""
        asked = []

        def install(off):
            def run(command, env, **options):
                folder = Path(command[-1])
                asked.append((json.loads((folder / engine.REQUEST).read_text()), env))
                ids = torch.tensor(asked[-1][0]["runs"][0]["prompts"])
                logprobs = model(ids).logits[0, -1].log_softmax(-1) + off
                checked = {"prefill": [9.0], "decode": [], "logprobs": logprobs.tolist(), "attention": "SOME"}
                timed = {"prefill": [2.0], "decode": [0.5, 0.25], "logprobs": [], "attention": "SOME"}
                (folder / engine.ANSWER).write_text(json.dumps([checked, timed, timed]))
                return CompletedProcess(command, 0)

            monkeypatch.setattr(engine, "find_spec", lambda name: object())
            monkeypatch.setattr(engine.subprocess, "run", run)
            return asked

        return install

    def test_steps_and_prefills_have_times(self, model, answering):
        asked = answering(0.0)
        results = measure(model, TINY, [DECODE, PREFILL], self.WAYS, 3)
        assert [(result.status, result.seconds) for result in results] == [("ok", (0.5, 0.25)), ("ok", (2.0,))] * 2
        assert {result.note for result in results} == {"SOME"}
        (request, alone), (_, ours) = asked
        assert [len(run["prompts"]) for run in request["runs"]] == [1, 2, 2]
        assert request["runs"][1]["prompts"][0] != request["runs"][1]["prompts"][1]
        assert [len(run["prompts"][0]) for run in request["runs"][1:]] == [DECODE.workload.keys, 19]
        assert alone["VLLM_PLUGINS"] == ""
        assert "VLLM_PLUGINS" not in ours

    def test_wrong_log_probabilities_get_no_time(self, model, answering):
        answering(torch.linspace(0, 1, TINY.vocabulary))
        results = measure(model, TINY, [DECODE, PREFILL], self.WAYS[:1], 3)
        assert [(result.status, result.seconds) for result in results] == [("wrong", ())] * 2

    @pytest.mark.parametrize(
        ("status", "errors", "note"),
        [
            (
                1,
                "a warning\n[rank0]: RuntimeError: no such thing\nLoading: 100%\n",
                "[rank0]: RuntimeError: no such thing",
            ),
            (-9, "Loading: 100%", "the process was ended by SIGKILL"),
            (3, "", "exit status 3"),
        ],
    )
    def test_a_process_that_fails_says_why(self, model, monkeypatch, status, errors, note):
        monkeypatch.setattr(engine, "find_spec", lambda name: object())
        monkeypatch.setattr(engine.subprocess, "run", lambda *args, **kwargs: CompletedProcess([], status, "", errors))
        (result,) = measure(model, TINY, [DECODE], self.WAYS[:1], 3)
        assert (result.status, result.note) == ("failed", note)

    def test_a_prompt_whose_scores_do_not_fit_is_skipped(self, model, monkeypatch):
        monkeypatch.setattr(engine, "find_spec", lambda name: object())
        monkeypatch.setattr(engine, "too_much", lambda size: f"needs {size} bytes")
        exact = torch.zeros(1, TINY.vocabulary)
        (result,) = engine.measure(model, TINY, [DECODE], self.WAYS[1], 3, exact, 1.0)
        assert (result.status, result.note) == ("skipped", f"needs {8 * 4 * 38**2} bytes")


@pytest.fixture
def generation():
    results = [
        Result(EAGER, DECODE, "ok", "", (1.0, 2.0, 4.0), 1e-6),
        Result(STOCK, DECODE, "ok", "", (1.0,), 1e-6),
        Result(OURS, DECODE, "ok", "2 absorbed", (0.25,), 1e-6),
        Result(OURS, PREFILL, "failed", "no such thing"),
    ]
    return Generation(TINY, 1_234_567, DEVICE, 0.5, {DECODE: 0.125, PREFILL: 0.5}, results)


class TestTable:
    def test_rows(self, generation):
        found = list(csv.DictReader(StringIO(table.as_csv(generation))))
        assert [float(row["tokens_per_second"]) for row in found[:3]] == [1.0, 2.0, 8.0]
        assert [float(row["speed_up"]) for row in found[:3]] == [0.5, 1.0, 4.0]
        assert [float(row["times_limit"]) for row in found[:3]] == [16.0, 8.0, 2.0]
        assert (found[3]["tokens_per_second"], found[3]["limit_tokens_per_second"]) == ("", "76.0")

    def test_text(self, generation):
        text = table.as_text(generation)
        assert "a computer: GEMM 100 GFLOP/s, copy 10 GB/s, float32; load average before the run 0.5" in text
        assert "tiny (deepseek_v2), unmodified transformers: 2 layers, 2 + 1 experts, vocabulary 128, 1M random" in text
        assert "decode at context 37, batch 2: limit 16 tokens/s" in text
        lines = [" ".join(line.split()) for line in text.splitlines()]
        assert "mla dynamic 8 2 4 1e-06 2 absorbed" in lines
        assert "mla dynamic - - - - failed: no such thing" in lines

    def test_plot(self, generation, tmp_path):
        pytest.importorskip("matplotlib")
        plot(generation, tmp_path / "plot.svg")
        text = (tmp_path / "plot.svg").read_text()
        assert "decode, batch 2" in text
        assert "mla, dynamic" in text


class TestCommand:
    def test_it_writes_what_it_prints(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setattr("mla_compile.bench.generation.run.measure_device", lambda *_: DEVICE)
        monkeypatch.setitem(models.MODELS, "v2-lite", TINY)
        csv_file, json_file = tmp_path / "rows.csv", tmp_path / "rows.json"
        options = "--layers 2 --modes eager --contexts 5 --prefill 4 --batches 1 3 --repeats 2 --dtype bfloat16"
        assert (
            main(["bench", "--model", "v2-lite", *options.split(), "--csv", str(csv_file), "--json", str(json_file)])
            == 0
        )
        rows = list(csv.DictReader(StringIO(csv_file.read_text())))
        assert [(row["batch"], row["workload"], row["dtype"], row["status"]) for row in rows] == [
            (batch, kind, "bfloat16", "ok") for batch in "13" for kind in ("decode", "prefill")
        ]
        written = json.loads(json_file.read_text())
        assert written["model"]["layers"] == 2
        assert [row["batch"] for row in written["rows"]] == [1, 1, 3, 3]
        assert all(len(row["seconds"]) == 2 for row in written["rows"])
        assert "decode at context 5, batch 3" in capsys.readouterr().out

    def test_by_hand_is_no_way_to_run_a_model(self, capsys):
        with pytest.raises(SystemExit):
            main(["bench", "--model", "v2-lite", "--modes", "by-hand"])
        assert "expected a workload, and a mode other than by-hand" in capsys.readouterr().err


@pytest.mark.slow
def test_the_machine_is_measured_around_the_run(model):
    found = run(TINY, [DECODE], [EAGER], 2)
    assert found.parameters == sum(weight.numel() for weight in model.parameters())
    assert found.limits[DECODE] > 0
    assert found.results[0].status == "ok"
