"""`make demo`, with few tokens and one cache: `mla` writes the text of eager, and all attentions are rewritten."""

import importlib.util
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


@pytest.mark.slow
def test_the_demo_writes_the_text_of_eager(monkeypatch, capsys, without_codegen):
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    demo = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", demo)  # its dataclass looks there
    spec.loader.exec_module(demo)
    monkeypatch.setattr(demo, "TOKENS", 3)
    monkeypatch.setattr(demo, "COMPILERS", (None, "mla"))
    monkeypatch.setattr(demo, "CACHES", ("dynamic",))
    demo.main()
    printed = capsys.readouterr().out
    assert "the same 3 tokens of text from all 2 of them" in printed
    assert "5 chunked; 5 absorbed" in printed
    assert "5 of 5 attentions rewritten" in printed
