"""The warp-specialised kernels for sm_90 run where they take the call and have agreed with the Triton kernel; that for
sm_100 has to be asked for."""

import dataclasses
import logging
import sys
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from mla_compile.asked import kept_to
from mla_compile.fp8 import FP8
from mla_compile.int8 import INT8
from mla_compile.kernels import native
from mla_compile.kernels._common import tuning
from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels._common.plans import Plans
from mla_compile.kernels.implementations import choose, packages, pages
from mla_compile.kernels.implementations import gluon as of_gluon
from mla_compile.kernels.implementations.gluon import HOPPER
from mla_compile.kernels.implementations.table import PAGED
from mla_compile.kernels.paged_latent_attention import aten, gluon
from mla_compile.kernels.paged_latent_attention.gluon import paged_latent_attention_gluon as launch

from ..recorded import recorded
from .test_choose import B200, H100, Ours, Timed, placed, problem

ASKS = "Gluon in tensor memory has not run on a GPU yet: mla.kernels='gluon' enables it"


@pytest.fixture(autouse=True)
def begun(install, monkeypatch, caplog):
    """A process without other projects' packages; in place of the kernel, ATen operations compute."""
    install()
    monkeypatch.setattr(packages, "_exists", lambda top: top == "mla_compile")
    monkeypatch.setattr(gluon, "paged_latent_attention_gluon", lambda x: aten.attend(x))
    monkeypatch.setattr(native, "load", lambda *_: None)  # to compile C++ takes longer than all else here
    caplog.set_level(logging.INFO, logger=choose.__name__)


def foreseen(machine, x, kernels="gluon", **named):
    """The name of what computes, and why the kernel for the machine's architecture does not."""
    verdict = choose.foreseen(PAGED, x, machine, kernels, **named)
    return verdict.name, verdict.others.get("Gluon" if machine != B200 else "Gluon in tensor memory")


def attend(x, kernels="auto", machine=H100):
    ours = Ours()
    with kept_to(kernels):
        results = choose.attend(PAGED, x, machine, ours)
    for result, expected in zip(results, aten.attend(x), strict=True):
        torch.testing.assert_close(result, expected, atol=0, rtol=0)
    return ours.calls


@pytest.mark.parametrize(("kernels", "machine"), [("auto", H100), ("gluon", H100), ("gluon", B200)])
def test_it_computes_once_it_agreed(caplog, kernels, machine):
    assert attend(problem(1, 64), kernels, machine) == 1  # by the trial
    assert attend(problem(1, 64), kernels, machine) == 0
    (record,) = caplog.records
    assert record.getMessage().startswith("mla::paged_latent_attention: Gluon")


@pytest.mark.parametrize(("kernels", "machine"), [("triton", H100), ("triton", B200), ("auto", B200)])
def test_unless_it_is_considered_ours_runs(kernels, machine):
    assert attend(problem(1, 64), kernels, machine) == 1
    with tuning.tuning(Timed()):  # nothing is timed
        assert attend(problem(1, 64), kernels, machine) == 1
    sentence = str(choose.foreseen(PAGED, problem(1, 64), machine, kernels))
    assert (ASKS in sentence) == (kernels == "auto")


@pytest.mark.parametrize(
    ("kernels", "recorded", "taken"), [("auto", True, True), ("auto", False, False), ("gluon", False, True)]
)
def test_a_graph_has_it_where_a_cuda_graph_records_it(kernels, recorded, taken):
    """Three launches from Python take longer than most decode steps."""
    name, why = foreseen(H100, problem(1, 64), kernels, recorded=recorded)
    assert (name == "Gluon") == taken
    assert taken or why.startswith("is launched from Python")
    assert choose.any_installed(PAGED, kernels, "sm_90", recorded) == taken


def test_the_fastest_runs_if_measured():
    with tuning.tuning(Timed(triton=1.0, Gluon=2.0)):
        assert attend(problem(1, 64)) == 1 + 3  # the trial; compared, timed; the call


def apart(x, of_page):
    """The same problem, with pages that begin `of_page` numbers apart."""
    pages = x.latent_pages.shape[0]
    rows = torch.zeros(pages * of_page, dtype=torch.bfloat16).as_strided((pages, 64, 576), (of_page, 576, 1))
    return dataclasses.replace(x, latent_pages=rows[..., :512], rope_pages=rows[..., 512:])


def coded(heads=16, dtype=FP8, groups=4, rope_too=False, queries=1):
    """A problem over latents in FP8 or INT8."""
    x = problem(queries, heads)
    scales = torch.rand(*x.latent_pages.shape[:2], groups) / 32 + 1 / 64
    latent = (x.latent_pages * 32).nan_to_num().clamp(-127, 127).to(dtype)
    rope = x.rope_pages.nan_to_num().to(dtype) if rope_too else x.rope_pages.contiguous()
    return dataclasses.replace(x, latent_pages=latent, rope_pages=rope, latent_scales=scales)


REFUSED = {
    "an architecture": (Machine("sm_120", 170), problem, "is for sm_90, this is sm_120"),
    "a dtype": (H100, lambda: problem(dtype=torch.float16), "takes bfloat16, found float16"),
    "a page size": (H100, lambda: problem(page_size=96), "takes pages of a multiple of 64 tokens, found 96"),
    "FP8 on sm_100": (B200, coded, "does not take FP8 pages"),
    "FP8 of rope keys": (H100, lambda: coded(groups=1, rope_too=True), "does not take rope keys in FP8 or INT8"),
    "many scales": (H100, lambda: coded(groups=8), "takes 1, 2 or 4 scales for each token, found 8"),
    "fixed parts": (H100, lambda: problem(split_tokens=64), "does not take results that do not depend on the batch"),
    "odd pages": (
        H100,
        lambda: apart(problem(), 64 * 576 + 4),
        "takes rows of pages at multiples of 16 bytes, found another layout",
    ),
    "odd rows": (
        H100,
        lambda: dataclasses.replace(x := problem(), rope_pages=torch.nn.functional.pad(x.rope_pages, (0, 1))[..., :64]),
        "takes rows of pages at multiples of 16 bytes, found another layout",
    ),
    "memory that begins elsewhere": (
        H100,
        lambda: placed(problem(), 8),
        "takes rows of pages at multiples of 16 bytes, found another layout",
    ),
}


@pytest.mark.parametrize(("machine", "make", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_it_does_not_take(machine, make, reason):
    assert foreseen(machine, make()) == ("triton", reason)


CLUSTERS = "Gluon in clusters"


@pytest.mark.parametrize(
    ("heads", "queries", "triton", "why"),
    [
        (65, 1, "3.9.0", None),
        (33, 2, "3.10.1+git", None),
        (64, 1, "3.9.0", "takes more than 64 heads and queries, found 64"),
        (65, 1, "3.8.0", "needs Triton 3.9 or newer, found 3.8.0"),
    ],
)
def test_clusters_are_for_more_rows_than_one_block_takes(monkeypatch, heads, queries, triton, why):
    monkeypatch.setattr(of_gluon, "version", lambda name: triton)
    x = problem(queries, heads)
    verdict = choose.foreseen(PAGED, x, H100, "gluon")
    assert (verdict.name, verdict.others.get(CLUSTERS)) == (("Gluon", why) if why else (CLUSTERS, None))
    assert "has not run on a GPU yet" in choose.foreseen(PAGED, x, H100, "auto").others[CLUSTERS]


TAKEN = {
    "pages some rows apart": lambda: apart(problem(), 66 * 576),
    "pages 16 bytes apart": lambda: apart(problem(), 64 * 576 + 8),
    "pages of several tiles": lambda: problem(page_size=128),
    "a page for each sequence": lambda: dataclasses.replace(
        x := problem(page_size=100), block_table=x.block_table[:, :1]
    ),
    "latents apart from rope keys": lambda: dataclasses.replace(x := problem(), rope_pages=x.rope_pages.clone()),
    "memory that begins elsewhere, at an offset": lambda: placed(problem(), 8, 8),
}


@pytest.mark.parametrize(
    "make",
    [coded, lambda: coded(8, INT8, 1), lambda: coded(5, groups=2, queries=3), lambda: coded(128)],
    ids=["4", "INT8", "2", "many rows"],
)
def test_latents_in_fp8_and_int8(make):
    x = make()
    assert foreseen(H100, x) == ("Gluon", None)
    assert attend(x) == 1  # by the trial
    assert attend(x) == 0


@pytest.mark.parametrize("make", [coded, lambda: coded(8, INT8, 1)], ids=["FP8", "INT8"])
def test_the_trial_has_codes_and_scales_of_the_same_kind(make):
    x = make()
    for scales in (x.latent_scales, x.latent_scales[:1, :1, :1]):
        small = pages.small(dataclasses.replace(x, latent_scales=scales))
        assert small.latent_pages.dtype == x.latent_pages.dtype
        assert (small.latent_scales.shape[:2] == (1, 1)) == (scales.numel() == 1)
        o, lse = aten.attend(small)
        assert o.isfinite().all()
        assert lse[0].isfinite().all()
        changed = dataclasses.replace(small, latent_scales=small.latent_scales * 1.01)
        assert not torch.equal(aten.attend(changed)[0], o)


@pytest.mark.parametrize(("page_size", "columns"), [(64, 3), (128, 1), (65536, 1), (65537, 1), (4096, 4)])
def test_the_trial_is_small_and_of_the_same_kind(page_size, columns):
    x = problem(1, 64, lengths=[5, 3])
    rows = torch.zeros(1, 1, 576, dtype=torch.bfloat16).expand(2, page_size, 576)
    table = torch.zeros(2, columns, dtype=torch.int32)
    x = dataclasses.replace(x, latent_pages=rows[..., :512], rope_pages=rows[..., 512:], block_table=table)
    small = pages.small(x)
    assert (small.block_table.shape[1] == 1) == (columns == 1)
    assert (small.latent_pages.shape[1] - page_size) % 64 == 0
    assert small.latent_pages.numel() <= 4 << 20
    if columns == 1:
        assert small.seq_lens.max() == small.latent_pages.shape[1]


def test_a_layout_that_it_does_not_take_is_another_choice():
    x = problem(1, 64)
    moved = torch.zeros(x.latent_pages.numel() + 4, dtype=torch.bfloat16)[4:].view(x.latent_pages.shape)
    apart = dataclasses.replace(x, latent_pages=x.latent_pages.contiguous(), rope_pages=x.rope_pages.contiguous())
    shifted = dataclasses.replace(apart, latent_pages=moved)
    assert (pages.Paged.of(apart).in_boxes, pages.Paged.of(shifted).in_boxes) == (True, False)
    assert pages.layout_of(apart) != pages.layout_of(shifted)


@pytest.mark.parametrize("captured", [False, True])
def test_memory_that_begins_elsewhere_is_another_choice(monkeypatch, captured):
    x = problem(1, 64)
    assert attend(placed(x, 0)) == 1  # by the trial
    assert attend(placed(x, 0)) == 0
    monkeypatch.setattr(choose, "in_capture", lambda: captured)
    assert attend(placed(x, 8)) == 1
    assert attend(placed(x, 16)) == 0


@pytest.mark.parametrize("machine", [H100, B200], ids=lambda machine: machine.arch)
@pytest.mark.parametrize("change", ["memory", "strides", "nothing"])
def test_queries_that_cannot_be_loaded_16_bytes_at_a_time_are_copied(change, machine):
    x = problem(1, 128)
    q = x.q_rope
    if change == "memory":
        q = torch.nn.functional.pad(q.flatten(), (4, 0))[4:].view(q.shape)
    if change == "strides":
        q = torch.nn.functional.pad(q, (0, 4))[..., :64]
    with recorded(machine.arch) as launches, mock.patch.object(gluon, "_PLANS", Plans()):
        launch(dataclasses.replace(x, q_rope=q), machine)
    given = launches[1].arguments[1]
    assert torch.equal(given, x.q_rope)
    assert (given is q) == (change == "nothing")
    assert given.data_ptr() % 16 == 0
    assert all(step % 8 == 0 for step in given.stride()[:3])


@pytest.mark.parametrize("machine", [H100, B200])
@pytest.mark.parametrize("make", TAKEN.values(), ids=TAKEN)
def test_what_it_takes(machine, make):
    name, why = foreseen(machine, make())
    assert (name.startswith("Gluon"), why) == (True, None)


def test_what_disagrees_is_not_used(monkeypatch):
    def wrong(x):
        o, lse = aten.attend(x)
        o[3, 0, 7, 511] += 1
        return o, lse

    monkeypatch.setattr(gluon, "paged_latent_attention_gluon", wrong)
    with pytest.warns(UserWarning, match="Gluon of mla_compile .*gives another o than expected on a small problem"):
        assert attend(problem(1, 64)) == 2


def test_without_gluon_in_triton_ours_runs_and_says_so(monkeypatch):
    monkeypatch.delitem(sys.modules, HOPPER.homes[0])
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.nvidia.hopper", None)
    with pytest.warns(UserWarning, match="^Gluon is not used: .* does not import: "):
        assert attend(problem(1, 64)) == 1
