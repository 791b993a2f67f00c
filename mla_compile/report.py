"""Reports of compilations: what the backend did to each attention, and why."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mla_compile.passes.outcome import Outcome

from .text_table import aligned

T = TypeVar("T", bound=tuple[Any, ...])
MOST_REPORTS = 1024
"""The number of reports that a process keeps, of some 70 KB each for a model of 60 layers."""
_HISTORY: deque[Report] = deque(maxlen=MOST_REPORTS)
_log = logging.getLogger(__name__)
_trace: Any = torch._logging  # its stubs lack `trace_structured`


@dataclass(frozen=True)
class Report:
    """The report of one compilation (from `explain`: of all compilations of one run)."""

    sites: tuple[Outcome, ...]
    """Every attention of the graph, in order."""

    note: str = ""
    """A remark about the whole graph, for instance why stock Inductor compiled it."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Wall time of the passes (`passes`), the second trace (`retrace`), Inductor's joint graph passes, which stock
    Inductor runs too (`joint_passes`), and the whole compilation (`compile`)."""

    kernels: tuple[str, ...] = ()
    """On a GPU, a sentence for each op that other projects' packages can compute too: which implementation runs, as far
    as the sizes tell, and why the others do not; where gradients are needed, for them too."""

    @property
    def rewritten(self) -> int:
        """The number of attentions that were rewritten."""
        return sum(site.rewritten for site in self.sites)

    def __str__(self) -> str:
        lines = [
            f"{self.rewritten} of {len(self.sites)} attentions rewritten" + (f": {self.note}" if self.note else "")
        ]
        if self.sites:
            rows = [("#", "path", "shapes", "mask", "source", "reason")]
            for i, site in enumerate(self.sites):
                shapes = " ".join(f"{name}={size}" for name, size in site.shapes.items())
                location, reason = _short(site.location), _with_guards(site)
                rows.append((str(i), site.path, shapes or "-", site.mask or "-", location, reason))
            lines += aligned(rows, "<")
            lines += _nearest_misses(self.sites)
            lines += _hints(self.sites)
        lines += [f"\n{sentence}" for sentence in self.kernels]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Report:
        """Read a report that `to_json` wrote."""
        fields = json.loads(text)
        tuples = ("guards", "trail")
        sites = tuple(Outcome(**site | {name: tuple(site[name]) for name in tuples}) for site in fields["sites"])
        return Report(sites, fields["note"], fields["seconds"], tuple(fields["kernels"]))


def _short(location: str) -> str:
    return "/".join(location.split("/")[-2:])


def _with_guards(site: Outcome) -> str:
    return site.reason + (f" while {' and '.join(site.guards)}" if site.guards else "")


def _nearest_misses(sites: Sequence[Outcome]) -> Iterator[str]:
    """For unchanged attentions, what would get them rewritten and how far the trace came. Identical texts, as of many
    layers, appear once."""
    for (trail, remedy), numbers in _alike(sites, lambda site: (site.trail, site.remedy)):
        yield f"\n{numbers}: {'to have this rewritten, if it is MLA, ' + remedy if remedy else 'traced this far'}"
        yield from (f"    {'from' if k == 0 else 'back to'} {line}" for k, line in enumerate(trail))


def _hints(sites: Sequence[Outcome]) -> Iterator[str]:
    """What else would save time. Identical hints appear once."""
    for (hint,), numbers in _alike(sites, lambda site: (site.hint,)):
        yield f"\n{numbers}: {hint}"


def _alike(sites: Sequence[Outcome], words: Callable[[Outcome], T]) -> Iterator[tuple[T, str]]:
    """Each distinct non-empty text about attentions, with the numbers of the attentions that it is about."""
    numbers: dict[T, list[str]] = {}
    for i, site in enumerate(sites):
        if any(said := words(site)):
            numbers.setdefault(said, []).append(str(i))
    return ((said, ", ".join(alike)) for said, alike in numbers.items())


def record(report: Report) -> None:
    """Add a report to the history, to the log (at level INFO: `TORCH_LOGS=mla_compile`) and to torch's trace."""
    _HISTORY.append(report)
    _log.info("%s", report)
    _trace.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "mla_report", "encoding": "json"},
        payload_fn=report.to_json,
    )


def reports() -> list[Report]:
    """Return the reports of all `backend="mla"` compilations and `rewrite` calls in this process, oldest first; where
    there were more than 1,024, the latest 1,024."""
    return list(_HISTORY)


def last_report() -> Report | None:
    """Return the report of the latest `backend="mla"` compilation or `rewrite` call in this process, or None."""
    return _HISTORY[-1] if _HISTORY else None


def merged(parts: Sequence[Report]) -> Report:
    """Merge the reports of several compilations into one, in which notes say of how many graphs they are."""
    seconds: dict[str, float] = {}
    for part in parts:
        for name, value in part.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
    notes = Counter(part.note for part in parts if part.note)
    told = [
        note if count == len(parts) else f"in {count} of {len(parts)} graphs {note}" for note, count in notes.items()
    ]
    kernels = dict.fromkeys(sentence for part in parts for sentence in part.kernels)
    return Report(tuple(site for part in parts for site in part.sites), "; ".join(told), seconds, tuple(kernels))
