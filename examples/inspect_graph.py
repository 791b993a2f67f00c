"""Look at the graph before and after the passes: depyf writes both to a folder, as code to read and debug.

Run: python examples/inspect_graph.py out/inspect
"""

import sys
from pathlib import Path

import depyf
import torch

import mla_compile
from plain_mla import NaiveMLA


@torch.no_grad()
def main(folder: Path) -> None:
    layer = NaiveMLA()
    past = torch.randn(1, 1024, layer.L), torch.randn(1, 1024, layer.R)
    with depyf.prepare_debug(str(folder)):
        torch.compile(layer, backend="mla")(torch.randn(1, 1, 1024), past)
    for path in sorted(folder.glob("*mla_*_passes*.py")):
        print(path)
    print(mla_compile.last_report())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out/inspect"))
