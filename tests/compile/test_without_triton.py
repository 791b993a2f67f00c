"""A CPU whose platform has no Triton, as macOS: nothing imports it."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import torch, mla_compile
from tests.models import HIDDEN, Combined, L, R
from tests.without_codegen import without_codegen

module = Combined()
inputs = torch.randn(1, 1, HIDDEN), (torch.randn(1, 40, L), torch.randn(1, 40, R))
with torch.no_grad(), without_codegen():
    found = torch.compile(module, backend="mla")(*inputs)[0]
    torch.testing.assert_close(found, module(*inputs)[0])
assert mla_compile.last_report().rewritten == 1, mla_compile.last_report()
"""


def test_attention_is_rewritten_and_right() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
