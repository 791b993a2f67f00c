"""What the cost model says of an attention: each path's work and time, and where absorbed and chunked cross."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mla_compile.passes.outcome import Outcome

from ..cost import Cost, Device, Dims, absorbed, chunked, expanded, predicted_seconds, sparse
from .collect import Proved

CONTEXTS = (1024, 8192, 65536)
"""Tokens before the queries, besides those that the attention has."""
MOST_QUERIES = 8192
AS_WRITTEN = "as written"


@dataclass(frozen=True)
class PathCost:
    """One way to do an attention. FLOPs and bytes are those of `mla_compile.cost`, seconds its roofline."""

    path: str
    flops: int
    bytes: int
    seconds: float
    chosen: bool


@dataclass(frozen=True)
class Point:
    """Predicted times where `queries` tokens meet the context and themselves."""

    queries: int
    absorbed: float
    chunked: float

    @property
    def faster(self) -> str:
        """The path that the cost model takes; absorbed on a tie, as `choose` does."""
        return "absorbed" if self.absorbed <= self.chunked else "chunked"


@dataclass(frozen=True)
class Curve:
    """Times over the number of queries, at one context."""

    context: int
    points: tuple[Point, ...]
    crossing: int | None
    """The fewest queries for which chunked is faster, None if it is for none up to the last."""
    here: Point | None
    """Where the attention itself stands, if this is its context."""


@dataclass(frozen=True)
class Model:
    """The cost model for one attention."""

    dims: Dims
    device: Device
    element_size: int
    workspace_tokens: int

    @staticmethod
    def of(proved: Proved, device: Device, workspace_tokens: int) -> Model:
        """The model that decided about an attention."""
        value: torch.Tensor = proved.site.node.meta["val"]
        return Model(proved.dims, device, value.element_size(), workspace_tokens)

    def paths(self, outcome: Outcome, topk: int | None) -> list[PathCost]:
        """Each path's cost, that of the code as it is written first."""
        costs = {
            AS_WRITTEN: expanded(self.dims, self.element_size),
            "chunked": chunked(self.dims, self.element_size, self.workspace_tokens),
            "absorbed": absorbed(self.dims, self.element_size),
        }
        if topk is not None:
            costs["sparse"] = sparse(self.dims, self.element_size, topk)
        return [
            PathCost(path, int(cost.flops), int(cost.bytes), self._seconds(cost), path == outcome.path)
            for path, cost in costs.items()
        ]

    def curves(self) -> list[Curve]:
        """Times at the attention's own context, and at others."""
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
        above = next((i for i, point in enumerate(points) if point.faster == "chunked"), None)
        if above is None:
            return None
        low, high = (points[above - 1].queries if above else 0), points[above].queries
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._at(context, middle).faster == "chunked" else (middle, high)
        return high

    def _at(self, context: int, queries: int) -> Point:
        dims = replace(self.dims, Sq=queries, T=context + queries)
        return Point(
            queries,
            self._seconds(absorbed(dims, self.element_size)),
            self._seconds(chunked(dims, self.element_size, self.workspace_tokens)),
        )

    def _seconds(self, cost: Cost) -> float:
        return predicted_seconds(cost, self.device)
