"""Another project's kernel computes what it takes, once it has agreed with the Triton kernel, which does the rest."""

import dataclasses
import json
import logging
import sys

import pytest
import torch

pytest.importorskip("triton")

from mla_compile.asked import kept_to
from mla_compile.kernels._common import tuning
from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels.implementations import choose
from mla_compile.kernels.implementations.table import PAGED
from mla_compile.kernels.paged_latent_attention import aten, paged_latent_attention_reference
from mla_compile.kernels.paged_latent_attention.arguments import PagedLatentAttention

from ..paged import make_paged
from .conftest import INSTALLED

H100, B200 = Machine("sm_90", 132), Machine("sm_100", 148)
L, R = 512, 64
RELEASES = ["flash_mla_2026", "flash_mla_2025"]
LENGTHS = [130, 3, 0, 64]


def problem(queries=2, heads=32, dtype=torch.bfloat16, index=torch.int32, page_size=64, lengths=LENGTHS, **changes):
    made = make_paged(lengths, (queries, heads, L, R), page_size, dtype, index)
    return dataclasses.replace(PagedLatentAttention(*made.arguments, True, made.scale), **changes)


def placed(x, start, offset=0):
    """The same problem, with pages at an offset in memory that begins so many bytes behind a multiple of 16."""
    rows = torch.cat([x.latent_pages, x.rope_pages], -1)
    memory = torch.zeros(rows.nbytes + 64, dtype=torch.uint8)
    begin = -memory.data_ptr() % 16 + start
    numbers = torch.frombuffer(memory.numpy(), dtype=rows.dtype, offset=begin)
    there = numbers.as_strided(rows.shape, rows.stride(), offset // rows.itemsize).copy_(rows)
    return dataclasses.replace(x, latent_pages=there[..., :L], rope_pages=there[..., L:])


class Ours:
    """A stand-in for the Triton kernel of this project, which counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return aten.attend(x)


def attend(x, machine, ours):
    return choose.attend(PAGED, x, machine, ours)


def exact(x):
    named = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
    return paged_latent_attention_reference(
        **{k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in named.items()}
    )


def chosen(caplog):
    return [record.getMessage() for record in caplog.records if record.name == choose.__name__]


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, logger=choose.__name__)


def assert_right(results, x):
    (o, lse), (expected, expected_lse) = results, exact(x)
    # Weights and results may be rounded to 8 bits; scores are sums of products of such numbers, in float32.
    assert (o.double() - expected).abs().max() <= 2**-7 * x.latent_pages.nan_to_num(0).abs().max()
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=0)
    assert (o.dtype, o.is_contiguous(), lse.dtype, lse.is_contiguous()) == (x.q_latent.dtype, True, torch.float32, True)
    assert (lse[2] == -torch.inf).all()


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_flash_mla_computes_what_it_takes(install, caplog, release, queries, index):
    install(release)
    x, ours = problem(queries, 64, index=index), Ours()
    results = attend(x, H100, ours)
    (line,) = chosen(caplog)
    assert line.startswith("mla::paged_latent_attention: FlashMLA")
    assert ours.calls == 1  # by the trial
    assert_right(results, x)


def test_it_is_chosen_once_for_a_layout(install, caplog):
    install("flash_mla_2026")
    ours = Ours()
    for _ in range(3):
        attend(problem(1, 64), H100, ours)
    attend(problem(1, 64, scale=0.3), H100, ours)
    assert (len(chosen(caplog)), ours.calls) == (1, 1)
    attend(problem(1, 64, lengths=[300]), H100, ours)
    assert (len(chosen(caplog)), ours.calls) == (2, 1)  # another batch is another layout, and no other trial


REFUSED = {
    "a dtype": (H100, lambda: problem(dtype=torch.float32), "takes bfloat16 and float16, found float32"),
    "a page size": (H100, lambda: problem(page_size=16), "takes pages of 64 tokens, found 16"),
    "a mask": (H100, lambda: problem(mask=torch.ones(1, 1, 1, 1, dtype=torch.bool)), "does not take a mask"),
    "fixed parts": (
        H100,
        lambda: problem(split_tokens=64),
        "does not take results that do not depend on the batch",
    ),
    "other queries": (
        H100,
        lambda: problem(first_positions=torch.tensor([100, 1, 0, 2])),
        "does not take queries that are not the last tokens",
    ),
    "latents apart from rope keys": (
        H100,
        lambda: dataclasses.replace(x := problem(), rope_pages=x.rope_pages.clone()),
        "takes latent and rope key in one row at multiples of 16 bytes, found another layout",
    ),
    "memory that begins elsewhere": (
        H100,
        lambda: placed(problem(), 8),
        "takes latent and rope key in one row at multiples of 16 bytes, found another layout",
    ),
    "few rows": (H100, lambda: problem(1, 16), "FlashMLA is not known to be faster"),
}


@pytest.mark.parametrize(("machine", "make", "reason"), REFUSED.values(), ids=REFUSED)
def test_ours_computes_the_rest_with_a_reason(install, caplog, machine, make, reason):
    install("flash_mla_2026")
    x, ours = make(), Ours()
    results = attend(x, machine, ours)
    for result, expected in zip(results, aten.attend(x), strict=True):
        torch.testing.assert_close(result, expected, atol=0, rtol=0)
    (line,) = chosen(caplog)
    assert line.startswith("mla::paged_latent_attention: triton; ")
    assert reason in line


def test_of_another_architecture_nothing_is_decided_at_a_call(install, caplog):
    install("flash_mla_2026")
    ours = Ours()
    attend(problem(), B200, ours)
    assert (ours.calls, chosen(caplog), len(choose.CHOICES)) == (1, [], 0)
    assert "FlashMLA is for sm_90, this is sm_100" in str(choose.foreseen(PAGED, problem(), B200))


def test_other_widths_and_fp8_are_refused(install, caplog):
    install("flash_mla_2026")
    made = make_paged([40], (1, 64, 256, 32), 64, torch.bfloat16)
    attend(PagedLatentAttention(*made.arguments, True, made.scale), H100, aten.attend)
    scales = torch.ones(1, 1, 1)
    x = problem(lengths=[40])
    fp8 = dataclasses.replace(x, latent_pages=x.latent_pages.to(torch.float8_e4m3fn), latent_scales=scales)
    attend(fp8, H100, aten.attend)
    assert "takes L, R = 512, 64, found 256, 32" in chosen(caplog)[0]
    assert "does not take FP8 pages" in chosen(caplog)[1]


def test_nothing_is_looked_at_where_nothing_is_installed(install, caplog):
    ours = Ours()
    attend(problem(1, 64), H100, ours)
    assert (ours.calls, len(choose.CHOICES), chosen(caplog)) == (1, 0, [])


def test_ours_alone(install, caplog):
    install("flash_mla_2026")
    ours = Ours()
    with kept_to("triton"):
        attend(problem(1, 64), H100, ours)
    assert (ours.calls, chosen(caplog)) == (1, [])
    assert "flash_mla" not in sys.modules


CHANGED = {
    "an argument of another name": (
        ("    cache_seqlens,", "    lengths,"),
        "flash_mla.flash_mla_with_kvcache has another signature than expected: missing a required",
    ),
    "one more that is required": (
        ("num_splits=None,\n    softmax_scale=None,", "num_splits,\n    sink,\n    softmax_scale,"),
        "has another signature than expected: missing a required argument: 'sink'",
    ),
    "a function that is gone": (("def get_mla_metadata", "def metadata"), "flash_mla.get_mla_metadata is not there"),
    "a package that does not import": (
        ("import dataclasses\n", "import none_of_this\n"),
        "does not import: No module named 'none_of_this'",
    ),
}
DIFFERENT = {
    "logarithms of base 2": (("return attend(", "return _in_base_2("), "gives another lse"),
    "a causal limit from the first key on": (("softmax_scale, causal)", "softmax_scale, False)"), "gives another o"),
    "what is behind the last key is multiplied": (("return attend(", "return _times_zero("), "gives another o"),
    "no dtype of its own": (("return attend(", "return _wide("), "gives o of [4, 2, 32, 512] torch.float32, expected"),
    "an error": (("is None\n", "is not None\n"), "fails on a small problem: AssertionError"),
}
HELPERS = """


def _in_base_2(*given):
    o, lse = attend(*given)
    return o, lse / 0.6931471805599453


def _times_zero(q, k_cache, block_table, cache_seqlens, *rest):
    o, lse = attend(q, k_cache, block_table, cache_seqlens, *rest)
    for b, length in enumerate(cache_seqlens.tolist()):
        last = block_table[b, max(length - 1, 0) // 64]
        o[b] += 0 * k_cache[last, :, 0].sum()
    return o, lse


def _wide(*given):
    o, lse = attend(*given)
    return o.float(), lse
"""


def changed(folder, old, new):
    """A folder with the newest FlashMLA, in which some text is replaced."""
    text = (INSTALLED / "flash_mla_2026/flash_mla/__init__.py").read_text()
    assert text.count(old) == 1
    (folder / "flash_mla").mkdir(parents=True)
    (folder / "flash_mla/__init__.py").write_text(text.replace(old, new) + HELPERS)
    return folder


@pytest.mark.parametrize(("change", "sentence"), CHANGED.values(), ids=CHANGED)
def test_another_signature_is_a_sentence_and_ours_runs(install, tmp_path, caplog, change, sentence):
    install(changed(tmp_path / "site", *change))
    ours = Ours()
    with pytest.warns(UserWarning, match="^FlashMLA is not used: ") as warned:
        attend(problem(), H100, ours)
    attend(problem(lengths=[5]), H100, ours)  # no second warning, which would be an error
    assert sentence in str(warned[0].message)
    assert (ours.calls, [sentence in line for line in chosen(caplog)]) == (2, [True, True])


@pytest.mark.parametrize(("change", "sentence"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_disagrees_with_ours_is_not_used(install, tmp_path, caplog, change, sentence):
    install(changed(tmp_path / "site", *change))
    ours, x = Ours(), problem()
    with pytest.warns(UserWarning, match="^mla::paged_latent_attention: FlashMLA of flash_mla ") as warned:
        o, _ = attend(x, H100, ours)
    assert sentence in str(warned[0].message)
    assert sentence in chosen(caplog)[0]
    torch.testing.assert_close(o, aten.attend(x)[0], atol=0, rtol=0)
    attend(problem(lengths=[5]), H100, ours)
    assert ours.calls == 3  # the trial, and two calls


def test_the_first_home_that_fits_is_used(install, tmp_path, caplog):
    install("flash_mla_2025", changed(tmp_path / "site", *CHANGED["a function that is gone"][0]))
    attend(problem(), H100, Ours())
    assert "sgl_kernel.flash_mla" in sys.modules
    assert chosen(caplog)[0].startswith("mla::paged_latent_attention: FlashMLA")


def test_nothing_is_tried_while_a_graph_is_captured(install, monkeypatch):
    install("flash_mla_2026")
    ours = Ours()
    with monkeypatch.context() as capture:
        capture.setattr(choose, "in_capture", lambda: True)
        attend(problem(), H100, ours)
        assert (ours.calls, len(choose.CHOICES)) == (1, 0)
    attend(problem(), H100, ours)
    assert (ours.calls, len(choose.CHOICES)) == (2, 1)
    monkeypatch.setattr(choose, "in_capture", lambda: True)
    attend(problem(), H100, ours)
    assert ours.calls == 2  # what is known is used


class Timed:
    """A timer that is told how long each implementation takes, and runs what it times."""

    def __init__(self, **seconds):
        self.seconds, self.asked = seconds, []

    def __call__(self, call):
        call()
        name = call.args[0]
        self.asked.append(name)
        return self.seconds[name]


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [({"triton": 1.0, "FlashMLA": 2.0}, "triton"), ({"triton": 3.0, "FlashMLA": 2.0}, "FlashMLA")],
)
def test_while_tuning_the_fastest_is_taken_and_kept_on_disk(install, tmp_path, caplog, seconds, fastest):
    install("flash_mla_2026")
    timed, heads = Timed(**seconds), 8  # so few that the Triton kernel is taken if nothing is measured
    with tuning.tuning(timed):
        attend(problem(1, heads), H100, Ours())
        attend(problem(1, heads), H100, Ours())
    assert timed.asked == ["triton", "FlashMLA"]
    (path,) = (tmp_path / "cache").glob("mla_compile/tiles-sm_90-132-*.json")
    ((key, kept),) = json.loads(path.read_text()).items()
    assert key.startswith(
        "implementation paged_latent_attention flash_mla Paged(dtype=torch.bfloat16, queries=1, heads=8"
    )
    assert kept == fastest
    install("flash_mla_2026")  # another process
    untimed = Timed()
    with tuning.tuning(untimed):
        attend(problem(1, heads), H100, Ours())
    assert untimed.asked == []
    assert [line.partition(": ")[2].partition(";")[0] for line in chosen(caplog)] == [fastest, fastest]


UNTRIED = (
    "Gluon in clusters has not run on a GPU yet: mla.kernels='gluon' enables it; Gluon is not installed; "
    "Gluon in tensor memory has not run on a GPU yet: mla.kernels='gluon' enables it"
)
REST = f"FlashAttention 3 is not installed; FlashInfer's trtllm-gen is not installed; {UNTRIED}"


def test_what_would_run_is_said_before_anything_has(install):
    x = problem()
    said = [str(choose.foreseen(PAGED, x, H100))]
    install("flash_mla_2026")
    said += [
        str(choose.foreseen(PAGED, x, machine, kernels))
        for machine, kernels in ((H100, "auto"), (B200, "auto"), (H100, "triton"))
    ]
    assert said == [
        f"mla::paged_latent_attention: triton; FlashMLA is not installed; {REST}",
        f"mla::paged_latent_attention: FlashMLA; {REST}",
        f"mla::paged_latent_attention: triton; FlashMLA is for sm_90, this is sm_100; {REST}",
        "mla::paged_latent_attention: triton",
    ]


MEASURED = {
    "FlashAttention 3, latents apart from rope keys": (
        "flash_attention_3",
        H100,
        lambda: dataclasses.replace(x := problem(2, 8, page_size=16), rope_pages=x.rope_pages.clone()),
        "FlashAttention 3",
    ),
    "FlashAttention 3, odd queries": (
        "flash_attention_3",
        H100,
        lambda: dataclasses.replace(x := problem(2, 8), q_rope=torch.nn.functional.pad(x.q_rope, (0, 1))[..., :R]),
        "FlashAttention 3",
    ),
    "FlashAttention 3": ("flash_attention_3", H100, lambda: problem(2, 8, torch.float16), "FlashAttention 3"),
    "FlashInfer": ("flashinfer_0_7", B200, lambda: problem(1, 8, page_size=32), "FlashInfer's trtllm-gen"),
    "FlashInfer, numbers of 64 bits": (
        "flashinfer_0_7",
        B200,
        lambda: problem(1, 128, index=torch.int64),
        "FlashInfer's trtllm-gen",
    ),
}


@pytest.mark.parametrize(("folder", "machine", "make", "name"), MEASURED.values(), ids=MEASURED)
def test_what_has_no_known_figures_runs_only_where_it_was_measured_to_be_faster(
    install, caplog, folder, machine, make, name
):
    install(folder)
    x, ours = make(), Ours()
    attend(x, machine, ours)
    assert f"{name} is not known to be faster" in chosen(caplog)[0]
    with tuning.tuning(Timed(**{"triton": 2.0, name: 1.0})):
        results = attend(x, machine, ours)
    assert chosen(caplog)[1].startswith(f"mla::paged_latent_attention: {name}")
    assert_right(results, x)


@pytest.mark.parametrize("start", [0, 8])
def test_flash_attention_3_leaves_memory_that_begins_elsewhere_to_ours(install, caplog, start):
    install("flash_attention_3")
    x, ours = placed(problem(2, 8, page_size=16), start), Ours()
    with tuning.tuning(Timed(**{"triton": 2.0, "FlashAttention 3": 1.0})):
        attend(x, H100, ours)
    (line,) = chosen(caplog)
    refused = "FlashAttention 3 takes latents and rope keys in rows at multiples of 16 bytes, found another layout"
    assert (refused in line) == (start == 8)


def test_more_queries_than_one_are_refused_where_only_one_was_read(install, caplog):
    install("flashinfer_0_7")
    attend(problem(2), B200, Ours())
    assert "FlashInfer's trtllm-gen takes 1 query token, found 2" in chosen(caplog)[0]
