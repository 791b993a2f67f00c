"""Reports beside the artifacts: on a warm cache the passes do not run, so what they had decided is kept on disk.

A file a graph, named by a hash of the Dynamo graph and of all that the passes depend on. It holds one report for each
set of guards; the first whose guards hold for the present sizes is the one whose artifact torch serves.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils._sympy import functions

from mla_compile.passes.nodes.shapes import hint_of

from .report import Report


class ReportStore:
    """The reports of one Dynamo graph."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], tag: str) -> None:
        values = [node.meta.get("example_value") for node in module.graph.nodes if node.op == "placeholder"]
        described = [
            (tuple(map(str, v.shape)), str(v.dtype), str(v.device), *_shared_out(v))
            if isinstance(v, torch.Tensor)
            else str(v)
            for v in values
        ]
        config = repr((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")))
        text = module.code + repr(described) + config + tag
        self._path = Path(cache_dir()) / "mla_compile" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
        self._hints = _hints(inputs)

    def load(self) -> Report | None:
        """The stored report whose guards hold, None if there is none."""
        return next((r for r in self._read() if self._holds(r)), None)

    def save(self, report: Report) -> None:
        """Keep a report for later processes."""
        kept = [r for r in self._read() if _guards(r) != _guards(report)]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, suffix=".tmp", delete=False) as file:
            json.dump([r.to_json() for r in [report, *kept]], file)
        os.replace(file.name, self._path)

    def _read(self) -> list[Report]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return [Report.from_json(text) for text in json.loads(self._path.read_text())]
        return []

    def _holds(self, report: Report) -> bool:
        return all(_true(guard, self._hints) for guard in _guards(report))


def _shared_out(tensor: torch.Tensor) -> tuple[str, ...]:
    """Over which ranks a DTensor is shared out, and how: its shape is that of the whole."""
    return tuple(str(getattr(tensor, name, "")) for name in ("device_mesh", "placements"))


def _guards(report: Report) -> set[str]:
    return {guard for site in report.sites for guard in site.guards}


_FUNCTIONS = {name: f for name, f in vars(functions).items() if isinstance(f, type) and issubclass(f, sympy.Function)}
"""What torch makes sizes of besides sympy's own, such as `PythonMod`."""


def _true(guard: str, hints: Mapping[str, int]) -> bool:
    return bool(sympy.sympify(guard, locals=_FUNCTIONS | {name: sympy.Integer(hint) for name, hint in hints.items()}))


def _hints(inputs: Sequence[Any]) -> dict[str, int]:
    """The present values of the symbols that the inputs' sizes are made of."""
    hints: dict[str, int] = {}
    sizes = [s for v in inputs for s in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    for size in sizes:
        if isinstance(size, torch.SymInt):
            environment = size.node.shape_env
            for symbol in size.node.expr.free_symbols:
                hints[str(symbol)] = hint_of(symbol, environment)
    return hints
