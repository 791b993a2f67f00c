"""The benchmark of the kernels, on the CPU at tiny sizes: the same cases, checks and tables as on a GPU."""

import csv
import functools
import json
import types
from dataclasses import asdict
from io import StringIO

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_compile.asked import asked
from mla_compile.bench import kernel_peers, kernel_run
from mla_compile.bench.kernel_cases import SCALE, Case, L, P, R, V, make_inputs
from mla_compile.bench.kernel_run import Result, as_csv, as_text, grid, limits_of, rows
from mla_compile.cli import main
from mla_compile.cost import Device
from mla_compile.errors import KernelError
from mla_compile.kernels import native
from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels.implementations import gluon as of_gluon
from mla_compile.kernels.paged_latent_attention import aten

CPU = torch.device("cpu")
DEVICE = Device("a GPU", 8e14, 4e12)
DECODE = Case("decode", 2, 1, 128, 3)
CASES = [
    DECODE,
    Case("decode", 2, 2, 128, 3),
    Case("decode", 2, 2, 128, 3, fp8=True),
    Case("sparse", 2, 2, 192, 3),
    Case("sparse", 2, 1, 192, 3, fp8=True),
    Case("prefill", 1, 64, 64, 3),
    Case("train", 2, 64, 64, 3),
]


def once(call):
    call()
    return 0.001


@pytest.fixture(scope="module")
def results():
    peers = ("mla", "mla-default", "sdpa", "inductor", "by-hand")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_run, "limits_of", lambda *_: DEVICE)
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
        patch.setattr(native, "load", lambda *_: None)  # C++ takes longer to compile than all else here
        return kernel_run.run(CASES, peers, CPU, torch.float32, once)[1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way_is_right(results, case):
    own = {result.peer: result for result in results if result.case == case}
    expected = {"mla", "mla-default"}
    if not case.fp8:
        expected |= {"inductor", "by-hand"} | ({"sdpa"} if case.kind != "sparse" else set())
    assert set(own) == expected
    assert {peer: (result.status, result.note) for peer, result in own.items()} == dict.fromkeys(own, ("ok", ""))
    assert all(result.error < 1e-4 for result in own.values())


@pytest.mark.parametrize(("peer", "kernels"), [("mla", "triton"), ("mla-default", "auto")])
def test_one_peer_is_by_our_kernels_alone_and_one_as_users_get_it(monkeypatch, peer, kernels):
    heard = []
    op = torch.ops.mla.expanded_attention
    monkeypatch.setattr(torch.ops.mla, "expanded_attention", lambda *a: heard.append(asked()) or op(*a))
    kernel_peers.calls(make_inputs(Case("train", 1, 64, 64, 2), CPU, torch.float32), (peer,))[peer]()()
    assert heard == [kernels]


def test_flex_is_right():
    x = make_inputs(Case("decode", 1, 2, 64, 2), CPU, torch.float32)
    from torch.nn.attention.flex_attention import flex_attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        o = kernel_peers.calls(x, ("flex",))["flex"]()()
    assert flex_attention is not None
    torch.testing.assert_close(o, kernel_peers.by_hand(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arch", "peer", "name"),
    [("sm_90", "mla-gluon", "Gluon"), ("sm_100", "mla-gluon", "Gluon"), ("sm_90", "mla-clusters", "Gluon in clusters")],
)
def test_the_peers_that_have_to_be_named(monkeypatch, arch, peer, name):
    x = make_inputs(Case("decode", 2, 1, 128, 80), CPU, torch.bfloat16)
    monkeypatch.setattr(kernel_peers, "present", lambda device: Machine(arch, 132))
    monkeypatch.setattr(of_gluon, "version", lambda name: "3.9.0")
    computed = types.SimpleNamespace(
        paged_latent_attention_gluon=aten.attend, paged_latent_attention_in_clusters=aten.attend
    )
    monkeypatch.setattr(kernel_peers.importlib, "import_module", lambda home: computed)
    call = kernel_peers.calls(x, (peer,))[peer]
    assert kernel_run._one(x, peer, call, *kernel_run._truth(x), once).status == "ok"
    monkeypatch.setattr(kernel_peers, "present", lambda device: Machine("sm_80", 108))
    with pytest.raises(KernelError, match=f"{name} is for sm_90, this is sm_80"):
        kernel_peers.calls(x, (peer,))[peer]()


def test_a_wrong_result_gets_no_time(monkeypatch):
    x = make_inputs(DECODE, CPU, torch.float32)
    exact, measure = kernel_run._truth(x)
    wrong = kernel_run._one(x, "mla", lambda: lambda: kernel_peers.by_hand(x) * 1.01, exact, measure, once)
    assert (wrong.status, wrong.seconds) == ("wrong", None)
    assert "away from float64, rounding explains at most" in wrong.note
    not_a_number = kernel_run._one(x, "mla", lambda: lambda: kernel_peers.by_hand(x) * torch.nan, exact, measure, once)
    assert not_a_number.status == "wrong"


def test_what_fails_and_what_does_not_fit_are_results():
    x = make_inputs(DECODE, CPU, torch.float32)
    exact, measure = kernel_run._truth(x)

    def fail(error):
        def call():
            raise error

        return kernel_run._one(x, "mla", lambda: call, exact, measure, once)

    assert fail(torch.OutOfMemoryError("no")).status == "skipped"
    failed = fail(ValueError("no such kernel"))
    assert (failed.status, failed.note) == ("failed", "ValueError: no such kernel")


def test_bytes_and_flops():
    decode = Case("decode", 3, 2, 640, 16)
    assert decode.flops == 2 * 3 * 2 * 16 * 640 * (2 * L + R)
    assert decode.bytes(2) == 3 * (640 * 576 * 2 + 2 * 16 * (576 + 512) * 2)
    assert Case("decode", 3, 2, 640, 16, fp8=True).bytes(2) == 3 * (640 * 656 + 2 * 16 * (576 + 512) * 2)
    sparse = Case("sparse", 1, 2, 8192, 16)
    assert sparse.flops == 2 * 2 * 16 * 2048 * (2 * L + R)
    assert sparse.bytes(2) == 2 * 2048 * 576 * 2 + 2 * 16 * (576 + 512) * 2
    prefill = Case("prefill", 1, 64, 64, 4)
    assert prefill.flops == 2 * 4 * (64 * L * (P + V) + 64 * 65 / 2 * (P + R + V))
    train = Case("train", 1, 64, 64, 4)
    of_scores, of_sums = 4 * (P + R), 3 * V  # once forward, and backward again, dq, dk; once forward, and dp, dv
    assert train.flops == 2 * 4 * (3 * 64 * L * (P + V) + 64 * 65 / 2 * (of_scores + of_sums))
    assert train.bytes(2) == 2 * prefill.bytes(2)


def test_the_table():
    fast = Result(DECODE, "mla", "ok", "", 1e-5, 3e-4)
    slow = Result(DECODE, "sdpa", "skipped", "needs more memory than is available")
    first, second = rows(DEVICE, [fast, slow])
    assert first["gb_per_s"] == pytest.approx(DECODE.bytes(2) / 1e-5 / 1e9)
    assert first["of_limit"] == pytest.approx(DECODE.bytes(2) / 4e12 / 1e-5)
    assert first["bound"] == "memory"
    assert second["us"] is second["of_limit"] is None
    text = as_text(DEVICE, [fast, slow])
    assert text.splitlines()[0] == (
        f"a GPU: copy 4000 GB/s, matmul 800.0 TFLOP/s, measured in this run; torch {torch.__version__}"
    )
    assert "skipped: needs more memory than is available" in text
    assert [row["peer"] for row in csv.DictReader(StringIO(as_csv(DEVICE, [fast, slow])))] == ["mla", "sdpa"]


def test_the_grid():
    cases = list(grid(["decode", "prefill"], [1, 4], [1024], [64], [16, 128], [1, 2], [False, True]))
    assert len(cases) == len(set(cases)) == 2 * (2 * 1 * 2 * 2) + 2
    assert Case("decode", 4, 2, 1024, 128, True) in cases
    assert Case("prefill", 1, 64, 64, 16) in cases


def test_the_first_peer_goes_first_and_results_are_kept_as_they_come(monkeypatch):
    monkeypatch.setattr(kernel_run, "limits_of", lambda *_: DEVICE)
    cases = [Case("decode", 1, 1, 64, 2), Case("sparse", 1, 1, 64, 2)]
    seen = []
    kernel_run.run(
        cases,
        ("by-hand", "sdpa"),
        CPU,
        torch.float32,
        once,
        lambda _, results: seen.append([(result.case.kind, result.peer) for result in results]),
    )
    first, second = ("decode", "by-hand"), ("sparse", "by-hand")
    assert seen == [[first], [first, second], [first, ("decode", "sdpa"), second], [first, ("decode", "sdpa"), second]]


@pytest.fixture
def on_the_cpu(monkeypatch):
    """`bench --device cuda` without a GPU: the same command on the CPU, by a clock that calls once."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    real = kernel_run.run
    monkeypatch.setattr(kernel_run, "limits_of", lambda *_: DEVICE)
    monkeypatch.setattr(
        kernel_run,
        "run",
        lambda cases, peers, device, progress: real(cases, peers, CPU, torch.float32, once, progress),
    )


def test_the_command(on_the_cpu, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    table, everything, figure = tmp_path / "table.csv", tmp_path / "all.json", tmp_path / "figure.png"
    grid_of = ["--kernels", "decode", "prefill", "--batches", "1", "2", "--contexts", "64", "128", "--prefill", "64"]
    rest = ["--heads", "2", "--queries", "1", "2", "--dtypes", "bf16", "--peers", "by-hand", "sdpa", "vllm"]
    files = ["--csv", str(table), "--json", str(everything), "--plot", str(figure)]
    assert main(["bench", "--device", "cuda", *grid_of, *rest, *files]) == 0
    found = list(csv.DictReader(StringIO(table.read_text())))
    assert len(found) == (2 * 2 * 2 + 1) * 2  # and nothing of vLLM, which is not here
    assert {row["status"] for row in found} == {"ok"}
    written = json.loads(everything.read_text())
    assert written["device"] == asdict(DEVICE)
    assert [(row["kind"], row["T"], row["peer"]) for row in written["rows"]] == [
        (row["kind"], int(row["T"]), row["peer"]) for row in found
    ]
    assert figure.stat().st_size > 10_000
    assert "a GPU: copy" in capsys.readouterr().out
    others = Case("decode", 1, 1, 64, 4), Case("decode", 1, 2, 64, 2), Case("sparse", 1, 1, 64, 2)
    monkeypatch.setattr(kernel_run, "QUICK", (*others, Case("decode", 1, 1, 64, 2), Case("decode", 1, 1, 64, 2, True)))
    some = ["--kernels", "decode", "--heads", "2", "--queries", "1", "--dtypes", "bf16"]
    assert main(["bench", "--device", "cuda", "--quick", "--max-autotune", "--peers", "sdpa", *some]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "B=" in line]
    assert "decode B=1 Sq=1 T=64 N=2 bf16  sdpa" in row


def test_the_quick_cases_are_some_of_each_kind_and_fit_a_gpu():
    kinds = {(case.kind, case.N, case.fp8) for case in kernel_run.QUICK}
    assert kinds >= {("decode", N, fp8) for N in (16, 128) for fp8 in (False, True)}
    assert {"sparse", "prefill", "train"} <= {case.kind for case in kernel_run.QUICK}
    assert all(case.B * case.T * 576 * 2 < 8 * 2**30 for case in kernel_run.QUICK)


def test_limits_are_rates_of_the_clock():
    limits = limits_of(CPU, torch.float32, lambda call: (call(), 0.5)[1])
    assert limits == Device("cpu", 2 * 256**3 / 0.5, 2 * 4 * 2**22 / 0.5)


def test_the_limit_of_a_copy_is_a_kernels():
    """torch copies on a GPU without a kernel, which a CUDA graph slows down."""

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **kwargs or {})

    def clock(call):
        with Ops():
            return (call(), 0.5)[1]

    called = []
    limits_of(CPU, torch.float32, clock)
    assert called == [torch.ops.aten.mm.default, torch.ops.aten.neg.out]


def test_a_context_that_is_no_multiple_of_a_page():
    with pytest.raises(ValueError, match="expected a multiple of 64 tokens, found 100"):
        make_inputs(Case("decode", 1, 1, 100, 2), CPU, torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--device", "cuda"])
    assert exit_.value.code == 2
    assert "--device cuda: expected a GPU that torch sees, found none" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu():
    device = torch.device("cuda")
    _, found = kernel_run.run(
        [Case("decode", 2, 2, 1024, 16), Case("prefill", 1, 512, 512, 16), Case("train", 1, 512, 512, 16)],
        ("mla",),
        device,
    )
    assert [result.status for result in found] == ["ok"] * 3


def test_the_scale_is_deepseeks():
    assert pytest.approx(192**-0.5) == SCALE
