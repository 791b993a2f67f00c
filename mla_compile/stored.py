"""Store reports beside torch's artifacts: with a warm cache the passes do not run, so their decisions are kept on disk.

There is one file per graph, named by a hash of the Dynamo graph and of all that the passes depend on. It holds one
report for each set of guards. The first report whose guards hold for the present sizes belongs to the artifact that
torch serves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._filelock import FileLock
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._sympy import functions

from mla_compile.passes.nodes.shapes import hint_of

from . import cache_files
from .dynamo.control_flow import code_of
from .dynamo.graph import EXAMPLE
from .report import Report


class ReportStore:
    """The reports of one Dynamo graph."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], tag: str) -> None:
        values = [node.meta.get(EXAMPLE) for node in module.graph.nodes if node.op == "placeholder"]
        described = [_described(value) for value in values]
        text = code_of(module) + repr(described) + repr((torch.is_grad_enabled(), _autocast())) + tag
        self._path = cache_files.path_of(hashlib.sha256(text.encode()).hexdigest())
        self._hints = _hints(inputs)

    def load(self) -> Report | None:
        """The stored report whose guards hold, or None."""
        return next((r for r in self._read() if self._holds(r)), None)

    def save(self, report: Report) -> None:
        """Keep a report for later processes, beside those that others have stored meanwhile."""
        with FileLock(f"{self._path}.lock"):
            kept = [r for r in self._read() if _guards(r) != _guards(report)]
            cache_files.write(self._path, [r.to_json() for r in [report, *kept]])

    def _read(self) -> list[Report]:
        return cache_files.read(self._path, lambda texts: [Report.from_json(text) for text in texts]) or []

    def _holds(self, report: Report) -> bool:
        return all(_true(guard, self._hints) for guard in _guards(report))


def _described(value: Any) -> object:
    """The properties of an input on which the passes depend; for a tensor subclass, those of its inner tensors too."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    sizes = tuple(map(str, value.shape)), _strides(value), value.requires_grad
    plain = (*sizes, str(value.dtype), str(value.device), *_shared_out(value))
    if not is_traceable_wrapper_subclass(value):
        return plain
    names, context = value.__tensor_flatten__()
    return plain, type(value).__qualname__, repr(context), [(n, _described(getattr(value, n))) for n in names]


def _strides(tensor: torch.Tensor) -> tuple[str, ...] | None:
    """None for a sparse tensor, which has none."""
    return tuple(map(str, tensor.stride())) if tensor.layout == torch.strided else None


def _autocast() -> list[torch.dtype | None]:
    """The dtype of each kind of devices under autocast; None where it is off."""
    kinds = ("cpu", "cuda")
    return [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds]


def _shared_out(tensor: torch.Tensor) -> tuple[str, ...]:
    """The mesh and placements of a DTensor, which its shape, that of the whole tensor, does not tell."""
    return tuple(str(getattr(tensor, name, "")) for name in ("device_mesh", "placements"))


def _guards(report: Report) -> set[str]:
    return {guard for site in report.sites for guard in site.guards}


_FUNCTIONS = {name: f for name, f in vars(functions).items() if isinstance(f, type) and issubclass(f, sympy.Function)}
"""torch's own sympy functions in sizes, such as `PythonMod`."""


def _true(guard: str, hints: Mapping[str, int]) -> bool:
    return bool(sympy.sympify(guard, locals=_FUNCTIONS | {name: sympy.Integer(hint) for name, hint in hints.items()}))


def _hints(inputs: Sequence[Any]) -> dict[str, int]:
    """The present values of the symbols in the inputs' sizes."""
    hints: dict[str, int] = {}
    sizes = [s for v in inputs for s in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    for size in sizes:
        if isinstance(size, torch.SymInt):
            environment = size.node.shape_env
            for symbol in size.node.expr.free_symbols:
                hints[str(symbol)] = hint_of(symbol, environment)
    return hints
