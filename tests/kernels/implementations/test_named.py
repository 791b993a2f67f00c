"""The Gluon kernel for named keys runs where it takes the call and has agreed with the Triton kernel."""

import dataclasses
import logging

import pytest
import torch

pytest.importorskip("triton")

from mla_compile.fp8 import FP8
from mla_compile.int8 import INT8
from mla_compile.kernels import launches, native
from mla_compile.kernels._common import machine
from mla_compile.kernels.implementations import choose, named, packages
from mla_compile.kernels.implementations.table import NAMED
from mla_compile.kernels.sparse_latent_attention import aten, gluon, sparse_latent_attention_reference
from mla_compile.kernels.sparse_latent_attention.arguments import SparseLatentAttention

from ..recorded import recorded
from .test_choose import B200, H100


@pytest.fixture(autouse=True)
def begun(install, monkeypatch, caplog):
    """A process without other projects' packages; in place of the kernel, ATen operations compute."""
    install()
    monkeypatch.setattr(packages, "_exists", lambda top: top == "mla_compile")
    monkeypatch.setattr(gluon, "sparse_latent_attention_gluon", aten.attend)
    monkeypatch.setattr(native, "load", lambda *_: None)
    caplog.set_level(logging.INFO, logger=choose.__name__)


def problem(heads=64, coded=FP8, groups=4, rank=512, dtype=torch.bfloat16, rope_too=False, causal=None):
    """A call over 70 keys of which each query names 20."""
    q = torch.randn(2, 1, heads, rank + 64, dtype=dtype)
    latent, rope = torch.randn(2, 70, rank), torch.randn(2, 70, 64, dtype=dtype)
    scales = None if coded is None else torch.rand(2, 70, groups) / 32 + 1 / 64
    latent = latent.to(dtype) if coded is None else (latent * 32).clamp(-127, 127).to(coded)
    indices = torch.randint(-1, 70, (2, 1, 20))
    rope = rope.to(coded) if rope_too else rope
    return SparseLatentAttention(q[..., :rank], q[..., rank:], latent, rope, indices, None, causal, 0.1, False, scales)


def attend(x, on=H100):
    """How often the Triton kernel's stand-in runs; the results are checked."""
    calls = []

    def ours(problem):
        calls.append(problem)
        return aten.attend(problem)

    results = choose.attend(NAMED, x, on, ours)
    for result, expected in zip(results, aten.attend(x), strict=True):
        torch.testing.assert_close(result, expected, atol=0, rtol=0)
    return len(calls)


@pytest.mark.parametrize(
    "make",
    [problem, lambda: problem(20, INT8, 1), lambda: problem(causal=30), lambda: problem(128, groups=2)],
    ids=["FP8", "INT8", "causal", "128 heads"],
)
def test_it_computes_once_it_agreed(caplog, make):
    assert attend(make()) == 1  # by the trial
    assert attend(make()) == 0
    (record,) = caplog.records
    assert record.getMessage().startswith("mla::sparse_latent_attention: Gluon")


@pytest.mark.parametrize(("recorded", "taken"), [(True, True), (False, False)])
def test_a_graph_has_it_where_a_cuda_graph_records_it(recorded, taken):
    verdict = choose.foreseen(NAMED, problem(), H100, recorded=recorded)
    assert (verdict.name == "Gluon") == taken
    assert taken or verdict.others["Gluon"].startswith("is launched from Python")


@pytest.mark.parametrize(
    ("coded", "kernels", "recorded", "by_inductor"),
    [
        (FP8, "auto", True, False),
        (FP8, "auto", False, True),
        (FP8, "triton", True, True),
        (FP8, "gluon", False, False),
        (None, "auto", True, True),
    ],
)
def test_inductor_launches_the_triton_kernel_where_it_computes(monkeypatch, coded, kernels, recorded, by_inductor):
    monkeypatch.setattr(machine, "present", lambda _: H100)
    arguments = tuple(vars(problem(coded=coded)).values())
    op = torch.ops.mla.sparse_latent_attention.default
    launch = launches.launch_of(op, arguments, {}, kernels, guards=True, recorded=recorded)
    assert (launch is not None) == by_inductor


REFUSED = {
    "an architecture": (B200, problem, "is for sm_90, this is sm_100"),
    "bfloat16": (
        H100,
        lambda: problem(coded=None),
        "takes latents in FP8 or INT8 and all else in bfloat16, found another dtype",
    ),
    "rope keys in FP8": (
        H100,
        lambda: problem(groups=1, rope_too=True),
        "takes latents in FP8 or INT8 and all else in bfloat16, found another dtype",
    ),
    "widths": (H100, lambda: problem(rank=256), "takes L, R = 512, 64, found 256, 64"),
    "few heads": (H100, lambda: problem(16), "takes more than 16 heads, found 16"),
    "many scales": (H100, lambda: problem(groups=8), "takes 1, 2 or 4 scales for each token, found 8"),
    "a mask": (
        H100,
        lambda: dataclasses.replace(problem(), mask=torch.zeros(1, 1, 1, 70, dtype=torch.bfloat16)),
        "does not take a mask",
    ),
    "odd rows": (
        H100,
        lambda: dataclasses.replace(x := problem(), k_rope=torch.nn.functional.pad(x.k_rope, (0, 1))[..., :64]),
        "takes rows of the cache at multiples of 16 bytes, found another layout",
    ),
}


@pytest.mark.parametrize(("on", "make", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_it_does_not_take(on, make, reason):
    verdict = choose.foreseen(NAMED, make(), on)
    assert (verdict.name, verdict.others["Gluon"]) == ("triton", reason)
    assert attend(make(), on) == 1


@pytest.mark.parametrize("make", [problem, lambda: problem(20, INT8, 1, causal=30)], ids=["FP8", "INT8"])
def test_the_trial_is_of_the_same_kind(make):
    x = make()
    small = named.small(x)
    assert named.Named.of(small) == dataclasses.replace(named.Named.of(x), aligned=True)
    assert small.latent_scales.isnan().any()
    o, lse = aten.attend(small)
    assert o.isfinite().all()
    assert (lse[1, 1] == -torch.inf).all()
    exact = sparse_latent_attention_reference(
        *(small.q_latent.double(), small.q_rope.double(), small.latent, small.k_rope.double(), small.indices),
        *(None, small.causal_offset, small.scale, False, small.latent_scales),
    )[0]
    torch.testing.assert_close(o.double(), exact, atol=2e-2, rtol=2e-2)


def test_what_is_launched(monkeypatch):
    """What each program takes, attention, and its combination; torch fills in the lengths before."""
    monkeypatch.undo()
    x = problem()
    with recorded("sm_90") as launched:
        o, lse = gluon.sparse_latent_attention_gluon(x, H100)
    assert [launch.kernel for launch in launched] == ["share_out", "attend_named", "combine"]
    assert o.shape == x.q_latent.shape
    assert lse.shape == x.q_latent.shape[:3]
