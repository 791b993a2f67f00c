"""Compile a model and collect every intermediate graph, the generated code, and the proof about each attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import sympy
import torch
from torch import fx
from torch._inductor.graph import GraphLowering

from mla_compile.passes.masks.meaning import Meaning
from mla_compile.passes.masks.named_keys import NamedKeys
from mla_compile.passes.mla.site import Site
from mla_compile.passes.nodes.shapes import hint_of
from mla_compile.passes.outcome import Outcome
from mla_compile.passes.pipeline import Result
from mla_compile.passes.text.proofs import proof_text

from ..backend import compile_and_record
from ..cost import Dims, Named
from ..dynamo.afresh import compiled_afresh
from ..graph_log import observed, snapshot
from ..report import Report
from ..rewriting import AFTER, BEFORE

STAGES = {
    "dynamo": "what Dynamo captured, at the level of torch functions",
    BEFORE: "functional ATen operations, attention sealed: what the passes are given",
    AFTER: "what the passes made of it",
    "mla_retraced": "traced again with Inductor's decompositions: what Inductor is given",
    "mla_launches": "on a GPU, the same with the kernel launches of attention in it: what Inductor is given there",
}
"""The graphs of a compilation in order, with a description of each."""


@dataclass(frozen=True)
class Proved:
    """What the passes know about an attention, in terms of the graph before them."""

    site: Site
    meaning: Meaning
    sizes: Mapping[str, int]
    """`B, Sq, T, N, L, P, R, V` as numbers; symbols of the graph have their present values."""
    named: Named | None
    """Which keys queries name, if the path may be sparse; with numbers for symbols."""
    text: str
    """The proof and the choice in the notation of the algebra."""

    @property
    def dims(self) -> Dims:
        """The sizes for the cost model."""
        return Dims(**self.sizes)


@dataclass
class Compilation:
    """The compilation of one graph."""

    step: str
    """A description of the call of the model."""
    part: str = ""
    """Which graph of the step this is, if there are several."""
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)
    """The graphs by stage (see `STAGES`); later stages are missing if nothing was rewritten."""
    code: list[str] = field(default_factory=list)
    """The code that Inductor generated."""
    report: Report = field(default_factory=lambda: Report(()))
    proved: dict[str, Proved] = field(default_factory=dict)
    """The proofs by the name of the attention's node, which is also in its `Outcome`."""

    @property
    def title(self) -> str:
        """The step and, if there are several graphs, the part."""
        return f"{self.step}, {self.part}" if self.part else self.step

    def on_graph(self, name: str, module: fx.GraphModule) -> None:
        """Keep a copy of the graph, as the passes change it in place."""
        self.graphs[name] = snapshot(module)

    def on_results(self, results: Sequence[Result]) -> None:
        """Keep what was proved."""
        self.proved = {
            result.outcome.node: _numbered(result, result.site, result.meaning)
            for result in results
            if result.site is not None and result.meaning is not None
        }

    def of(self, outcome: Outcome) -> Proved | None:
        """What was proved about an attention; None if it stays unchanged."""
        return self.proved.get(outcome.node) if outcome.rewritten else None


def compilations(model: Callable[..., Any], step: str, *args: Any, **kwargs: Any) -> list[Compilation]:
    """Compile `model` afresh, run it once without gradients, and return the compilation of every graph."""
    found: list[Compilation] = []

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compilation = Compilation(step, graphs={"dynamo": snapshot(module)})
        with observed(compilation), mock.patch.object(GraphLowering, "save_output_code", compilation.code.append):
            call, compilation.report = compile_and_record(module, inputs)
        found.append(compilation)
        return call

    with torch.no_grad(), compiled_afresh(model, backend) as compiled:
        compiled(*args, **kwargs)
    for number, compilation in enumerate(found, 1):
        compilation.part = f"graph {number} of {len(found)}" if len(found) > 1 else ""
    return found


def _numbered(result: Result, site: Site, meaning: Meaning) -> Proved:
    """What was proved about a site, with sizes as numbers."""
    environment: Any = result.environment  # not None if sizes are symbols

    def now(size: Any) -> int:
        expression = sympy.sympify(size)
        return int(expression.subs({symbol: hint_of(symbol, environment) for symbol in expression.free_symbols}))

    keys = NamedKeys.of(site, meaning)
    named = None if keys is None else replace(keys.named, count=now(keys.count))
    sizes = {name: now(size) for name, size in site.sizes.items()}
    return Proved(site, meaning, sizes, named, proof_text(site, meaning, result.choice))
