"""The log of graphs and proofs, in loggers and in torch's own tools."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla_compile.rewriting import AFTER, BEFORE
from tests.models import HIDDEN, Combined, L, R


def test_the_proof_of_each_attention_is_logged(caplog, without_codegen):
    with caplog.at_level(logging.DEBUG, logger="mla_compile.graph_log"), torch.no_grad():
        torch.compile(Combined().eval(), backend="mla")(
            torch.randn(2, 3, HIDDEN), (torch.randn(2, 9, L), torch.randn(2, 9, R))
        )
    (text,) = [record.getMessage() for record in caplog.records if "What was proved" in record.getMessage()]
    assert "latent[b, t, l]" in text
    assert "w_uk[n, p, l]" in text
    assert "score[b, s, n, t]" in text
    assert "causal: t <= s" in text
    assert "absorbed: " in text or "chunked: " in text


def test_what_refused_an_attention_is_logged(caplog, without_codegen):
    """Keys and values go through a nonlinearity, so they are no up-projection."""
    latent, weight = torch.randn(1, 9, 6), torch.randn(6, 64)
    with caplog.at_level(logging.DEBUG, logger="mla_compile.graph_log"), torch.no_grad():
        torch.compile(refused, backend="mla")(torch.randn(1, 4, 3, 8), latent, weight)
    (text,) = [record.getMessage() for record in caplog.records if "What was proved" in record.getMessage()]
    assert "is unchanged: prove stopped, expected values that are an up-projection of a latent" in text


def refused(q, latent, weight):
    k, v = (latent @ weight).unflatten(-1, (4, 16)).transpose(1, 2).sin().split([8, 8], dim=-1)
    return torch.softmax(q @ k.mT, dim=-1) @ v


SHOWN = """
import sys; sys.path.insert(0, {root!r})
import torch
from functorch.compile import make_boxed_func
from mla_compile.inductor import codegen
from tests.models import HIDDEN, Combined
codegen.compile_fx_inner = lambda module, inputs, **kwargs: make_boxed_func(module.forward)
with torch.no_grad():
    torch.compile(Combined(), backend="mla")(torch.randn(1, 3, HIDDEN), Combined.empty_cache(1))
"""


def test_torchs_own_tools_find_our_graphs(tmp_path):
    """What the docs say of TORCH_LOGS, TORCH_TRACE (which tlparse reads) and TORCH_COMPILE_DEBUG."""
    asked = {"TORCH_LOGS": "+mla_compile", "TORCH_TRACE": str(tmp_path / "trace"), "TORCH_COMPILE_DEBUG": "1"}
    settings = os.environ | asked
    code = SHOWN.format(root=str(Path(__file__).parents[2]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | settings,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 1 attentions rewritten" in done.stderr
    assert BEFORE in done.stderr
    written = sorted(path.name for path in tmp_path.glob("torch_compile_debug/run_*/mla_compile/*"))
    assert written == [f"00{i}_{name}.py" for i, name in enumerate([BEFORE, AFTER, "mla_retraced"])]
    (trace,) = (tmp_path / "trace").glob("*.log")
    artifacts = re.findall(r'"artifact": \{"name": "(mla_\w+)".*\n((?:\t.*\n)+)', trace.read_text())
    assert [name for name, _ in artifacts] == [BEFORE, "mla_proofs", AFTER, "mla_retraced", "mla_report"]
    assert "torch.ops.mla.sealed_attention" in artifacts[0][1]
    report = json.loads(artifacts[-1][1].replace("\t", ""))
    assert [site["path"] for site in report["sites"]] == ["chunked"]
    tlparse = Path(sys.executable).with_name("tlparse")
    if not tlparse.exists():
        pytest.skip("all but the last step is as it was: tlparse is not installed")
    subprocess.run([tlparse, trace, "-o", tmp_path / "page", "--no-browser"], check=True, capture_output=True)
    assert {re.sub(r"_\d+$", "", path.stem) for path in tmp_path.glob("page/*/mla_*")} == {n for n, _ in artifacts}


def test_the_log_has_reports_at_info_and_graphs_at_debug(caplog, without_codegen):
    with caplog.at_level(logging.DEBUG, "mla_compile"):
        torch.compile(Combined(), backend="mla")(torch.randn(1, 3, HIDDEN), Combined.empty_cache(1))
    told = {r.name: r.levelname for r in caplog.records if r.name.startswith("mla_compile")}
    assert told == {"mla_compile.report": "INFO", "mla_compile.graph_log": "DEBUG"}
