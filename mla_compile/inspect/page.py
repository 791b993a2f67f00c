"""Write index.html, a single file that loads nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template

import torch

from mla_compile.passes.paths.all import words

from ..cost import Device
from ..graph_log import readable
from ..report import Report, merged
from ..rewriting import AFTER, BEFORE
from ..units import in_seconds, span
from ..version import __version__
from .card import Group, card
from .collect import STAGES, Compilation

LONGEST = 400_000
"""The largest number of characters of a text that the page includes."""


@dataclass(frozen=True)
class Inspection:
    """The content of a page."""

    name: str
    """The name of the model."""
    compilations: Sequence[Compilation]
    device: Device
    """The device whose rates the cost model used."""
    workspace_tokens: int

    @property
    def report(self) -> Report:
        """The merged report of all compilations."""
        return merged([compilation.report for compilation in self.compilations])


def page(inspection: Inspection, written: Sequence[Sequence[str]]) -> str:
    """The page as HTML; `written` are the paths of each compilation's files, relative to the page."""
    here = files(__package__)
    report, device = inspection.report, inspection.device
    shown = [(number, c) for number, c in enumerate(inspection.compilations) if c.report.sites]
    groups = {number: groups_of(compilation, first) for (number, compilation), first in _with_first(shown)}
    steps = [_step(inspection, number, c, groups[number], written[number]) for number, c in shown]
    return Template((here / "page.html").read_text()).substitute(
        style=(here / "style.css").read_text(),
        name=escape(inspection.name),
        lead=_lead(inspection),
        facts=_facts(inspection),
        contents="".join(
            f'<a href="#{group.anchor}">{escape(inspection.compilations[number].title)}: '
            f"{group.outcome.path} × {len(group.numbers)}</a>"
            for number, found in groups.items()
            for group in found
        ),
        steps="\n".join(steps),
        report=escape(str(report)),
        flops_rate=f"{device.flops_per_s / 1e9:,.4g} GFLOP/s",
        bytes_rate=f"{device.bytes_per_s / 1e9:,.4g} GB/s",
        device=escape(device.name),
    )


def groups_of(compilation: Compilation, first: int) -> list[Group]:
    """Group the attentions that came out alike; the report numbers them from `first`."""
    found: dict[tuple[object, ...], Group] = {}
    for number, site in enumerate(compilation.report.sites, first):
        key: tuple[object, ...] = (
            site.path,
            tuple(site.shapes.items()),
            site.mask,
            site.location,
            site.reason,
            site.guards,
        )
        if not site.rewritten:
            key += (site.node,)  # unchanged ones are not grouped
        group = found.setdefault(key, Group(site, compilation.of(site), compilation, []))
        group.numbers.append(number)
    return list(found.values())


def _with_first(shown: Sequence[tuple[int, Compilation]]) -> list[tuple[tuple[int, Compilation], int]]:
    first, found = 0, []
    for numbered in shown:
        found.append((numbered, first))
        first += len(numbered[1].report.sites)
    return found


def _lead(inspection: Inspection) -> str:
    report = inspection.report
    counts = Counter(site.path for site in report.sites if site.rewritten)
    rewritten = ", ".join(f"{counts[path]} {path}" for path in words() if path in counts)
    return (
        f"<strong>{report.rewritten} of {len(report.sites)}</strong> attentions rewritten"
        + (f": {rewritten}." if rewritten else ".")
        + (f" Other graphs: {escape(report.note)}." if report.note else "")
    )


def _facts(inspection: Inspection) -> str:
    steps = dict.fromkeys(c.step for c in inspection.compilations)
    seconds = inspection.report.seconds
    facts = {
        "ran": ", then ".join(steps),
        "device": inspection.device.name,
        "time of the passes": f"{in_seconds(seconds.get('passes', 0.0))} of {in_seconds(seconds.get('compile', 0.0))}",
        "versions": f"mla_compile {__version__}, torch {torch.__version__}",
    }
    return "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items())


def _step(
    inspection: Inspection, number: int, compilation: Compilation, groups: Sequence[Group], written: Sequence[str]
) -> str:
    sizes = [
        f"{len(compilation.graphs[stage].graph.nodes)} nodes"
        for stage in (BEFORE, AFTER)
        if stage in compilation.graphs
    ]
    links = ", ".join(f'<a href="{escape(path)}">{escape(path.rpartition("/")[2])}</a>' for path in written)
    cards = "".join(card(group, inspection.device, inspection.workspace_tokens) for group in groups)
    numbers = [n for group in groups for n in group.numbers]
    count = f"Attention{'s' if len(numbers) > 1 else ''} {span(numbers)}"
    return (
        f'<section id="step-{number}"><h2>{escape(compilation.title)}</h2>'
        f'<p class="under">{count} of the report; graph of {" before and ".join(sizes)}'
        f'{" after the passes" if len(sizes) == 2 else ""}. <span class="files">Files: {links}</span></p>{cards}'
        f"{_whole(compilation)}</section>"
    )


def _whole(compilation: Compilation) -> str:
    """Whole graphs and generated code, folded. Texts that are too long are only in the files."""
    texts = {f"The whole graph: {STAGES[stage]}": readable(graph) for stage, graph in compilation.graphs.items()}
    texts |= {
        f"The code that Inductor generated{f', {n}' if n else ''}": code for n, code in enumerate(compilation.code)
    }
    return "".join(
        f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
        for title, text in texts.items()
        if len(text) <= LONGEST
    )
