"""What a report says of an attention that stays as it is: how far the trace came, and what would change that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_compile
from mla_compile.passes.outcome import Outcome
from mla_compile.report import MOST_REPORTS, Report, merged, record

N, L, P, V = 2, 4, 3, 3


def attention(q: Tensor, latent: Tensor, w: Tensor) -> Tensor:
    kv = (latent @ w).view(1, -1, N, P + V).transpose(1, 2)
    k_nope, v = kv.split([P, V], -1)
    k = k_nope.tanh()
    scores = q @ k.transpose(-1, -2)
    return scores.softmax(-1) @ v


@pytest.mark.usefixtures("without_codegen")
def test_the_nearest_miss_is_traced_to_the_line_where_it_stopped() -> None:
    report = mla_compile.explain(attention, torch.randn(1, N, 9, P), torch.randn(1, 9, L), torch.randn(L, N * (P + V)))
    (site,) = report.sites
    assert site.path == "unchanged"
    assert "k = k_nope.tanh()" in site.trail[-1]
    assert [line.split("`")[1] for line in site.trail] == [
        "return scores.softmax(-1) @ v",
        "scores = q @ k.transpose(-1, -2)",
        "k = k_nope.tanh()",
    ]
    assert "to the latent before the up-projection" in site.remedy
    advice = f"\n0: to have this rewritten, if it is MLA, {site.remedy}\n    from {site.trail[0]}\n    back to"
    assert advice in str(report)
    assert Report.from_json(report.to_json()) == report


def test_alike_misses_of_many_layers_are_told_once() -> None:
    miss = Outcome("bmm", "model.py:1", "", "unchanged", "expected one, found another", remedy="do so", trail=("`a`",))
    fine = Outcome("bmm_1", "model.py:1", "", "absorbed", "few queries")
    lines = str(Report((miss, fine, miss))).splitlines()
    assert lines[-2:] == ["0, 2: to have this rewritten, if it is MLA, do so", "    from `a`"]


def test_the_latest_reports_are_kept() -> None:
    assert MOST_REPORTS == 1024  # as the documentation says
    for number in range(MOST_REPORTS + 2):
        record(Report((), f"number {number}"))
    kept = [report.note for report in mla_compile.reports()]
    assert kept == [f"number {number}" for number in range(2, MOST_REPORTS + 2)]
    assert mla_compile.last_report() == Report((), kept[-1])


def test_a_note_of_some_graphs_is_no_note_of_all() -> None:
    fine, miss = (
        Outcome("bmm", "model.py:1", "", "absorbed", "few"),
        Outcome("bmm", "model.py:1", "", "unchanged", "no"),
    )
    rewritten, stock = Report((fine,), kernels=("ours",)), Report((miss,), "nothing to rewrite")
    both = str(merged([rewritten, stock, rewritten]))
    assert both.startswith("2 of 3 attentions rewritten: in 1 of 3 graphs nothing to rewrite\n")
    assert str(merged([stock, stock])).startswith("0 of 2 attentions rewritten: nothing to rewrite\n")
