"""What the passes did can be looked at with depyf."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("depyf")


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="depyf copies an itertools.count, which Python 3.14 refuses")
@pytest.mark.filterwarnings("ignore")
def test_depyf_writes_the_graph_before_and_after_the_passes(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import inspect_graph

    inspect_graph.main(tmp_path)
    sys.modules.pop("inspect_graph")
    (before,) = tmp_path.glob("*mla_before_passes*.py")
    (after,) = tmp_path.glob("*mla_after_passes*.py")
    assert "mla.sealed_attention" in before.read_text()
    assert "mla.latent_attention" in after.read_text()
    assert "mla.sealed_attention" not in after.read_text()
    assert "1 of 1 attentions rewritten" in capsys.readouterr().out
