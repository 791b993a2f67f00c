"""The cost model's predictions for an attention: each path's work and time, and where the paths cross."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mla_compile.passes.outcome import Outcome
from mla_compile.passes.paths import all as every
from mla_compile.passes.paths.as_written import expanded_cost
from mla_compile.passes.paths.path import Path

from ..cost import Cost, Device, Dims, Named, predicted_seconds
from .collect import Proved

CONTEXTS = (1024, 8192, 65536)
"""The contexts (tokens before the queries) to plot besides the attention's own."""
MOST_QUERIES = 8192
AS_WRITTEN = "as written"


@dataclass(frozen=True)
class PathCost:
    """The cost of an attention on one path: FLOPs and bytes as in `mla_compile.cost`, seconds by its roofline."""

    path: str
    flops: int
    bytes: int
    seconds: float
    chosen: bool


@dataclass(frozen=True)
class Point:
    """The predicted times for `queries` tokens that attend to the context and to themselves."""

    queries: int
    seconds: dict[str, float]
    """The time of each path, by its word, in the order in which the cost model prefers paths on a tie."""

    @property
    def faster(self) -> str:
        """The path that the cost model chooses."""
        return min(self.seconds, key=lambda word: self.seconds[word])


@dataclass(frozen=True)
class Curve:
    """Times over the number of queries, at one context."""

    context: int
    points: tuple[Point, ...]
    crossing: int | None
    """The smallest number of queries for which a path other than the first is faster; None if there is none up to the
    last point."""
    here: Point | None
    """The point of the attention itself, if this is its context."""


@dataclass(frozen=True)
class Model:
    """The cost model for one attention."""

    dims: Dims
    device: Device
    element_size: int
    workspace_tokens: int
    candidates: tuple[Path, ...]
    """The paths that are possible for it."""

    @staticmethod
    def of(proved: Proved, device: Device, workspace_tokens: int) -> Model:
        """The model that decided about an attention."""
        value: torch.Tensor = proved.site.node.meta["val"]
        candidates = every.paths_of(proved.site, proved.meaning)
        return Model(proved.dims, device, value.element_size(), workspace_tokens, candidates)

    def paths(self, outcome: Outcome, named: Named | None) -> list[PathCost]:
        """The cost of the code as written, then that of each path, the slowest first."""
        costs = {path.word: self._cost(path, self.dims, named) for path in self.candidates}
        found = [
            PathCost(word, int(cost.flops), int(cost.bytes), self._seconds(cost), word == outcome.path)
            for word, cost in {AS_WRITTEN: expanded_cost(self.dims, self.element_size), **costs}.items()
        ]
        return found[:1] + sorted(found[1:], key=lambda path: -path.seconds)

    @property
    def drawn(self) -> tuple[Path, ...]:
        """The paths whose times depend on the sizes alone."""
        return tuple(path for path in self.candidates if path.competes(self.dims, None))

    def curves(self) -> list[Curve]:
        """The curves for the attention's own context and for `CONTEXTS`."""
        queries, keys = int(self.dims.Sq), int(self.dims.T)
        own = max(keys - queries, 0)
        return [self._curve(context, self._at(context, queries) if context == own else None) for context in
                sorted({own, *CONTEXTS})]  # fmt: skip

    def _curve(self, context: int, here: Point | None) -> Curve:
        last = max(MOST_QUERIES, here.queries if here is not None else 0)
        counts = [1]
        while counts[-1] < last:
            counts.append(min(last, max(counts[-1] + 1, int(counts[-1] * 1.5))))
        points = tuple(self._at(context, count) for count in counts)
        return Curve(context, points, self._crossing(context, points), here)

    def _crossing(self, context: int, points: tuple[Point, ...]) -> int | None:
        first = self.drawn[0].word
        above = next((i for i, point in enumerate(points) if point.faster != first), None)
        if above is None:
            return None
        low, high = (points[above - 1].queries if above else 0), points[above].queries
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._at(context, middle).faster != first else (middle, high)
        return high

    def _at(self, context: int, queries: int) -> Point:
        dims = replace(self.dims, Sq=queries, T=context + queries)
        return Point(queries, {path.word: self._seconds(self._cost(path, dims, None)) for path in self.drawn})

    def _cost(self, path: Path, dims: Dims, named: Named | None) -> Cost:
        return path.cost(dims, self.element_size, self.workspace_tokens, named)

    def _seconds(self, cost: Cost) -> float:
        return predicted_seconds(cost, self.device)


def expands(word: str) -> bool:
    """Whether a path, given by its word in a report, makes keys and values of every head."""
    return any(path.expands for path in every.PATHS if path.word == word)


def style(word: str) -> str:
    """The CSS class for a path, given by its word in a report."""
    return "expands" if expands(word) else "absorbs" if any(path.word == word for path in every.PATHS) else ""
