"""Write the folder of `mla-compile inspect`."""

from __future__ import annotations

import re
from pathlib import Path

from ..graph_log import readable
from .card import proof
from .collect import STAGES, Compilation
from .page import Inspection, page


def write(inspection: Inspection, folder: Path) -> list[Path]:
    """Write all files, and return their paths, the page first."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [_write_compilation(c, folder, n) for n, c in enumerate(inspection.compilations)]
    report = inspection.report
    texts = {
        "index.html": page(inspection, [[str(path.relative_to(folder)) for path in paths] for paths in written]),
        "report.txt": f"{report}\n",
        "report.json": report.to_json(),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [*(folder / name for name in texts), *(path for paths in written for path in paths)]


def _write_compilation(compilation: Compilation, folder: Path, number: int) -> list[Path]:
    own = folder / f"{number:02}-{re.sub(r'[^a-z0-9]+', '-', compilation.title.lower())}"
    own.mkdir(exist_ok=True)
    texts = {
        f"{place}_{stage}.py": f"# {STAGES[stage]}\n\n{readable(compilation.graphs[stage])}"
        for place, stage in enumerate(STAGES)
        if stage in compilation.graphs
    }
    for place, code in enumerate(compilation.code):
        texts[f"{len(STAGES)}_inductor{f'_{place}' if place else ''}.py"] = code
    if compilation.proved:
        texts["proofs.txt"] = _proofs(compilation)
    texts["report.txt"] = f"{compilation.report}\n"
    for name, text in texts.items():
        (own / name).write_text(text)
    return [own / name for name in texts]


def _proofs(compilation: Compilation) -> str:
    """What the passes proved about each attention, as text."""
    lines: list[str] = []
    for number, outcome in enumerate(compilation.report.sites):
        lines.append(f"{number}  {outcome.path}: {outcome.reason}")
        proved = compilation.proved.get(outcome.node)
        if proved is not None:
            lines += [f"   {name:<20} {value}" for name, value in proof(proved)]
            lines += ["", *(f"   {line}" for line in proved.text.splitlines()), ""]
    return "\n".join([*lines, ""])
