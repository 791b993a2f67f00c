"""`mla-compile layout`: weights of a config.json, meshes, what each holds and exchanges, its time, its commands."""

import itertools
import json
import math
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import pytest

from mla_compile import cli
from mla_compile.bench.link import fit, measure, meshes_of
from mla_compile.cluster.engines import engines, refused, transformers, vllm
from mla_compile.cluster.exchanges import exchanges
from mla_compile.cluster.link import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND, Exchange, Link
from mla_compile.cluster.mesh import Mesh, meshes
from mla_compile.cluster.model import read_model
from mla_compile.cluster.plan import ClusterPlan, where_it_pays
from mla_compile.cluster.rates import bytes_per_second, flops_per_second, link
from mla_compile.cluster.stage import stages
from mla_compile.cluster.step import Device, Step, Task
from mla_compile.passes.paths.exchange import InLatentSpace

TINY = Path(__file__).parents[1] / "examples" / "tiny-deepseek-v3"
V3 = json.loads((TINY.parent / "deepseek-v3.json").read_text())
FP8 = {"quantization_config": V3.pop("quantization_config")}
DEVICE = Device(memory=72 * 2**30, bandwidth=3.35e12, flops=989e12)
LINK = Link(bandwidth=450e9, latency=5e-6)
CLUSTER = "--memory 72GiB --bandwidth 3.35TB/s --flops 989T --link 450GB/s,5us"


@pytest.fixture
def v3(config):
    return read_model(config(**V3 | FP8))


def step_of(model, mesh, batch=16, context=128 * 1024, device=DEVICE, dtype="bf16"):
    return Step(model, Task(batch, context, dtype), device, LINK, mesh)


def test_deepseek_v3_has_671_billion(v3):
    assert round(v3.elements / 1e9) == 671
    assert v3.layers[0].heads == 171_966_464  # of 187,105,280 weights of attention, as in docs/tensor-parallel.md
    assert v3.element_size == 1 + 4 / 128**2
    assert replace(v3, fp8=False).element_size == 2


def test_latents_are_on_every_rank_of_tensor_parallelism_and_shared_out_by_dcp(v3):
    sequence = 128 * 1024 * 61 * 1152
    for tp in (1, 8, 16):
        assert step_of(v3, Mesh(tp, 1, 1, 1, 1), batch=1).cache == sequence
    assert f"{sequence / 2**30:.2f}" == "8.58"
    assert step_of(v3, Mesh(8, 8, 1, 1, 1), batch=1).cache == sequence // 8
    assert f"{sequence / 8 / 2**30:.2f}" == "1.07"
    assert step_of(v3, Mesh(8, 8, 1, 1, 1), batch=1, context=9, dtype="fp8").cache == 2 * 61 * 656


def test_outputs_of_dcp_are_the_bytes_that_the_passes_exchange(v3):
    (stage,) = stages(v3, 1)
    mesh = Mesh(8, 8, 1, 1, 1)
    found = [e for e in exchanges(v3, mesh, stage, 1, LINK) if e.calls == 61]
    sizes = {"B": 1, "Sq": 1, "N": 16, "L": 512, "R": 64}
    assert [e.kind for e in found] == [ALL_GATHER, ALL_TO_ALL]
    assert sum(e.received for e in found) == InLatentSpace("group", 8).received(sizes, 2) == 244_160


def test_bytes_and_messages_of_collectives():
    size, ranks = 1024, 4
    received = {ALL_REDUCE: 1536, ALL_GATHER: 3072, REDUCE_SCATTER: 3072, ALL_TO_ALL: 768}
    messages = {ALL_REDUCE: 4, ALL_GATHER: 2, REDUCE_SCATTER: 2, ALL_TO_ALL: 2}
    for kind, expected in received.items():
        exchange = Exchange(kind, ranks, size, calls=3)
        assert exchange.received == expected
        assert Link(1e6, 1e-3).seconds(exchange) == pytest.approx(3 * (messages[kind] * 1e-3 + expected / 1e6))
    assert (Exchange(SEND, 2, size, 1).received, Exchange(SEND, 2, size, 1).messages) == (size, 1)


def test_a_collective_for_each_that_a_mesh_needs(v3):
    """Two sums a layer, one if its experts are sent tokens of several groups; embedding, head, and the next stage."""
    layers = next(stages(v3, 1)), next(stages(v3, 2))

    def calls(mesh, stage=layers[0]):
        found = {}
        for exchange in exchanges(v3, mesh, stage, 2, LINK):
            found[exchange.kind] = found.get(exchange.kind, 0) + exchange.calls
        return found

    assert calls(Mesh(1, 1, 4, 1, 1)) == {}
    assert calls(Mesh(8, 1, 1, 1, 1)) == calls(Mesh(8, 1, 1, 8, 1)) == {ALL_REDUCE: 2 * 61 + 1, ALL_GATHER: 1}
    assert calls(Mesh(8, 4, 1, 1, 1)) == {ALL_REDUCE: 123, ALL_GATHER: 61 + 1, ALL_TO_ALL: 61}
    assert calls(Mesh(1, 1, 4, 4, 1)) == {ALL_GATHER: 58, REDUCE_SCATTER: 58}
    assert calls(Mesh(1, 1, 64, 64, 1)) == {ALL_TO_ALL: 2 * 58}  # of 64 groups, 8 have what a token asks for
    assert calls(Mesh(2, 1, 2, 4, 1)) == {ALL_REDUCE: 61 + 3 + 1, ALL_GATHER: 1 + 58 + 58, REDUCE_SCATTER: 58}
    assert calls(Mesh(2, 1, 1, 1, 2), layers[1]) == {ALL_REDUCE: 2 * 31 + 1, SEND: 1}


@pytest.mark.parametrize("devices", [1, 6, 16])
def test_every_mesh_is_there_once(devices):
    found = list(meshes(devices))
    assert len(found) == len(set(found))
    sizes = range(1, devices + 1)
    expected = {
        Mesh(tp, dcp, dp, ep, pp)
        for tp, dcp, dp, ep, pp in itertools.product(sizes, repeat=5)
        if tp * dp * pp == devices and tp % dcp == 0 and (ep == 1 or (ep % tp == 0 and dp * tp % ep == 0))
    }
    assert set(found) == expected


def test_stages_are_those_of_vllm(v3):
    assert [stage.layers for stage in stages(v3, 1)] == [61]
    assert [stage.layers for stage in stages(v3, 4)] == [15, 15, 16, 15]
    assert [stage.layers for stage in stages(v3, 8)] == [7, 7, 8, 8, 8, 8, 8, 7]
    assert [(stage.first, stage.last) for stage in stages(v3, 3)] == [(True, False), (False, False), (False, True)]


@pytest.mark.parametrize(
    ("mesh", "batch", "why"),
    [
        (Mesh(3, 1, 1, 1, 1), 1, "TP 3 does not divide 128 heads"),
        (Mesh(1, 1, 3, 3, 1), 4, "EP 3 does not divide 256 experts"),
        (Mesh(32, 1, 1, 32, 1), 1, "TP 32 does not divide intermediate_size 18,432 in blocks of 128"),
        (Mesh(1, 1, 1, 1, 62), 1, "PP 62 is more than 61 layers"),
        (Mesh(1, 1, 4, 1, 1), 3, "DP 4 is more than the batch of 3"),
        (Mesh(16, 16, 1, 1, 1), 1, None),
        (Mesh(1, 1, 256, 256, 1), 256, None),
    ],
    ids=str,
)
def test_what_engines_refuse(v3, mesh, batch, why):
    found = refused(v3, mesh, batch)
    assert (found and str(found)) == why


def test_experts_need_experts_and_cut_ones_whole_blocks(config):
    dense = read_model(config(**V3 | {"n_routed_experts": None}))
    assert str(refused(dense, Mesh(2, 1, 1, 2, 1), 1)) == "EP 2 of a model without experts"
    narrow = read_model(config(**V3 | FP8 | {"moe_intermediate_size": 384}))
    why = "TP 2 does not divide moe_intermediate_size 384 in blocks of 128"
    assert str(refused(narrow, Mesh(2, 1, 1, 1, 1), 1)) == why
    assert refused(narrow, Mesh(2, 1, 1, 2, 1), 1) is None


def test_what_transformers_takes(v3, config):
    takes = {mesh for mesh in meshes(8) if "transformers" in engines(v3, mesh)}
    assert takes == {Mesh(tp, 1, 8 // tp, ep, 1) for tp in (1, 2, 4, 8) for ep in {1, tp}}
    even = read_model(config(**V3 | {"num_hidden_layers": 60}))
    assert engines(even, Mesh(2, 1, 1, 1, 4)) == ("vLLM", "transformers")
    assert engines(even, Mesh(2, 1, 1, 2, 4)) == engines(even, Mesh(2, 1, 1, 1, 8)) == ("vLLM",)


def test_one_device_reads_each_weight_once_and_the_experts_of_a_token(v3):
    step = step_of(v3, Mesh(1, 1, 1, 1, 1), 1, 1000, Device(2**50, 1.0, math.inf))
    layers = sum(layer.whole + layer.heads + layer.dense + 8 * layer.expert for layer in v3.layers)
    head = 7168 * 129280 * 2
    assert step.seconds == pytest.approx(
        {"weights": layers * v3.element_size + head, "cache": 1000 * 61 * 1152, "flops": 0, "link": 0}
    )
    embedded = step.weights - 2 * head
    assert embedded == pytest.approx((v3.elements - 2 * 7168 * 129280 - 7168) * v3.element_size)


def test_many_sequences_read_all_experts_and_are_bound_by_flops(v3):
    step = step_of(v3, Mesh(1, 1, 1, 1, 1), 4096, 100, Device(2**50, math.inf, 1.0))
    layers = sum(layer.whole + layer.heads + layer.dense + 8 * layer.expert for layer in v3.layers)
    attention = 61 * 128 * 100 * (2 * 512 + 64)
    assert step.seconds["flops"] == pytest.approx(2 * 4096 * (layers + 7168 * 129280 + attention))
    assert step.bound == "flops"
    few, many = (step_of(v3, Mesh(1, 1, 1, 1, 1), batch, 1, Device(2**50, 1.0, math.inf)) for batch in (1, 4096))
    read = sum(248 * layer.expert for layer in v3.layers) * v3.element_size
    assert many.seconds["weights"] - few.seconds["weights"] == pytest.approx(read)


def test_devices_share_the_work_out(v3):
    """What has heads or is in experts is halved by two devices; what is whole, and latents without DCP, is not."""
    device = Device(2**50, 1.0, math.inf)
    one, two, dcp = (step_of(v3, Mesh(n, k, 1, 1, 1), 2, 1000, device) for n, k in ((1, 1), (2, 1), (2, 2)))
    whole = sum(layer.whole for layer in v3.layers) * v3.element_size
    assert two.seconds["weights"] - whole == pytest.approx((one.seconds["weights"] - whole) / 2)
    assert two.seconds["cache"] == one.seconds["cache"] == 2 * dcp.seconds["cache"]
    groups = step_of(v3, Mesh(1, 1, 2, 2, 1), 2, 1000, device)
    assert groups.seconds["cache"] == one.seconds["cache"] / 2


def test_a_pipeline_waits_for_its_slowest_stage(v3):
    device = Device(2**50, 1.0, math.inf)
    for vocabulary, layers in ((129280, 15), (128, 16)):  # the last stage has the head, the one before it a layer more
        piped = step_of(replace(v3, vocabulary=vocabulary), Mesh(1, 1, 1, 1, 4), 8, 1000, device)
        assert piped.sequences == 2
        assert piped.seconds["cache"] == 4 * 2 * 1000 * 1152 * layers
        assert piped.cache == 8 * 1000 * 1152 * 16


def test_the_fastest_is_first_and_the_others_say_why_not(v3):
    plan = ClusterPlan(v3, Task(16, 128 * 1024), DEVICE, LINK, 16)
    times = [step.time for step in plan.steps]
    assert times == sorted(times)
    assert all(step.fits for step in plan.steps)
    assert plan.why_not(plan.steps[0]) == ""
    for step in plan.steps[1:]:
        bound, more, unit = plan.why_not(step).split() if plan.why_not(step) != "as fast" else ("link", "+0", "ms")
        assert (bound in step.seconds, unit) == (True, "ms")
        assert float(more) == pytest.approx(1000 * (step.seconds[bound] - plan.steps[0].seconds[bound]), rel=1e-2)
    assert all(" GiB of 72 GiB: " in plan.why_not(step) for step in plan.too_large)
    assert {*plan.refused, *(step.mesh for step in plan.steps + plan.too_large)} == set(meshes(16))


def test_where_it_pays(v3):
    plan = ClusterPlan(v3, Task(4, 4096), DEVICE, LINK, 64)
    plans = plan.scaled()
    assert [fewer.devices for fewer in plans] == [1, 2, 4, 8, 16, 32, 64]
    assert [bool(fewer.steps) for fewer in plans] == [False] * 4 + [True] * 3
    assert where_it_pays(plans[:3]) == "The model fits on no number of devices up to this one."
    words = where_it_pays(plans)
    assert words.startswith("A token is cheapest on 16 devices: ")
    fastest = min(plans[4:], key=lambda fewer: fewer.steps[0].time)
    assert f"A step is fastest on {fastest.devices}: {1000 * fastest.steps[0].time:.3g} ms" in words


def test_flags_of_vllm(v3):
    mesh = Mesh(4, 2, 4, 8, 2)
    text = vllm(step_of(v3, mesh, batch=64, dtype="fp8"), "a-model")
    assert text.replace(" \\\n ", "").split() == [
        *("vllm", "serve", "a-model", "--tensor-parallel-size", "4", "--decode-context-parallel-size", "2"),
        *("--dcp-comm-backend", "a2a", "--data-parallel-size", "2", "--enable-expert-parallel"),
        *("--all2all-backend", "allgather_reducescatter", "--pipeline-parallel-size", "2"),
        *("--max-model-len", "131072", "--max-num-seqs", "16", "--kv-cache-dtype", "fp8"),
    ]
    assert mesh.engines == 2
    assert "--all2all-backend deepep_low_latency" in vllm(step_of(v3, Mesh(1, 1, 64, 64, 1), batch=64), "a-model")
    plain = vllm(step_of(v3, Mesh(1, 1, 1, 1, 1)), "a-model")
    assert plain.split() == [
        *("vllm", "serve", "a-model", "\\", "--tensor-parallel-size", "1", "\\"),
        *("--max-model-len", "131072", "\\", "--max-num-seqs", "16"),
    ]


def test_code_of_transformers_runs():
    pytest.importorskip("transformers")
    names = {}
    exec(transformers(step_of(read_model(TINY), Mesh(1, 1, 1, 1, 1)), str(TINY)), names)
    assert names["model"].config.num_attention_heads == 8
    assert names["plan"]["model.layers.*.self_attn.kv_b_proj"] == "colwise"
    many = transformers(step_of(read_model(TINY), Mesh(4, 1, 1, 4, 1)), "m")
    assert "--nproc-per-node 4" in many
    assert "DistributedConfig(tp_size=4, ep_size=4, tp_plan=plan)" in many
    piped = transformers(step_of(read_model(TINY), Mesh(2, 1, 1, 1, 5)), "m")
    assert "--nproc-per-node 10" in piped
    assert "DistributedConfig(tp_size=2, pp_size=5, tp_plan=plan)" in piped


def test_the_table(config, capsys):
    arguments = f"layout {config(**V3 | FP8)} --gpus 16 --context 128k --batch 16 --rows 3 {CLUSTER}"
    assert cli.main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "deepseek_v3: 671 billion weights in FP8, 61 layers of N=128 L=512 P=128 R=64 V=128, 8 of 256 experts" in out
    assert "16 devices of 72 GiB, 3.35 TB/s, 989 TFLOP/s; link 450 GB/s, 5 us" in out
    assert "more are slower." in out
    assert "do not fit, of which TP " in out
    assert "vllm serve" in out
    assert "transformers: no mesh that it supports fits." in out
    assert "A token is cheapest on 16 devices" in out


def test_json_has_every_mesh(config, capsys):
    arguments = f"layout {config(**V3 | FP8)} --gpus 16 --context 128k --batch 16 --json {CLUSTER}"
    assert cli.main(arguments.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["meshes"]) + len(found["refused"]) == len(list(meshes(16)))
    by_mesh = {tuple(row[name] for name in ("tp", "dcp", "dp", "ep", "pp")): row for row in found["meshes"]}
    assert f"{by_mesh[16, 1, 1, 1, 1]['sequence'] / 2**30:.2f}" == "8.58"
    assert f"{by_mesh[8, 8, 2, 1, 1]['sequence'] / 2**30:.2f}" == "1.07"
    assert sum(by_mesh[16, 1, 1, 1, 1]["seconds_by"].values()) == by_mesh[16, 1, 1, 1, 1]["seconds"]


def test_a_small_model_has_code_for_transformers(capsys):
    assert cli.main(f"layout {TINY} --gpus 2 --context 1k --batch 2 {CLUSTER}".split()) == 0
    assert "transformers in each of 2 groups of processes, TP 1" in capsys.readouterr().out


def test_nothing_that_fits_and_nothing_that_is_taken(config, capsys):
    arguments = f"layout {config(**V3)} --gpus 8 {CLUSTER}".split()
    assert cli.main(arguments) == 1
    assert "The model fits on no number of devices up to this one." in capsys.readouterr().out
    assert cli.main(f"layout {TINY} --gpus 7 {CLUSTER}".split()) == 1
    out = capsys.readouterr().out
    assert "Neither engine supports any mesh of that many devices." in out
    assert "refused: TP does not divide 8 heads (TP 7)." in out


def test_plot(config, tmp_path):
    file = tmp_path / "layout.svg"
    pytest.importorskip("matplotlib")
    arguments = f"layout {config(**V3 | FP8)} --gpus 32 --batch 16 --plot {file} {CLUSTER}"
    assert cli.main(arguments.split()) == 0
    assert "<svg" in file.read_text()


def test_plot_without_matplotlib_is_refused(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(f"layout {TINY} --gpus 2 --plot layout.png {CLUSTER}".split()) == 2
    assert "pip install 'mla-compile[plot]'" in capsys.readouterr().err


def test_rates():
    assert [bytes_per_second(text) for text in ("3.35TB/s", "1 GiB/s", "900gb")] == [3.35e12, 2**30, 9e11]
    assert [flops_per_second(text) for text in ("989T", "1.5 PFLOP/s", "60 gflops")] == [989e12, 1.5e15, 60e9]
    assert link("450GB/s,3us") == Link(450e9, 3e-6)
    no_unit = bytes_per_second, "3.35"
    for parse, wrong in (
        no_unit,
        (bytes_per_second, "fast"),
        (flops_per_second, "989"),
        (link, "450GB/s"),
        (link, "1GB/s,0us"),
        (bytes_per_second, "9" * 400 + "TB/s"),
        (flops_per_second, "9" * 400 + "T"),
        (link, f"1GB/s,{'9' * 400}us"),
    ):
        with pytest.raises(ArgumentTypeError, match="expected"):
            parse(wrong)


def test_a_link_is_fitted_to_its_own_times():
    exchanges = [Exchange(kind, 4, size, 1) for kind in (ALL_REDUCE, ALL_TO_ALL) for size in (256, 65536, 2**20)]
    found = fit([(exchange, LINK.seconds(exchange)) for exchange in exchanges])
    assert found.bandwidth == pytest.approx(LINK.bandwidth)
    assert found.latency == pytest.approx(LINK.latency)


@pytest.mark.slow
def test_the_predicted_order_of_four_meshes_is_the_measured_one(config):
    """Measured between four gloo processes. Latency and bandwidth are fitted to other calls."""
    model = read_model(config(**V3 | {"num_hidden_layers": 8}))
    fitted, found = measure(model, meshes_of(4), ranks=4, batch=16, repeats=9)
    predicted = {one.mesh: sum(map(fitted.seconds, one.exchanges)) for one in found}
    measured = {one.mesh: one.seconds for one in found}
    assert sorted(predicted, key=predicted.__getitem__) == sorted(measured, key=measured.__getitem__)
