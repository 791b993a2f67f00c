"""Model the time of an exchange between devices: sequential messages, and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from .. import cost

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND = (
    *("all_reduce", "all_gather", "reduce_scatter"),
    *("all_to_all", "send"),
)


class Link(cost.Link):
    """The connection between any two devices, with the time of exchanges over it."""

    def seconds(self, exchange: Exchange) -> float:
        """The time of all calls of an exchange, with no overlap with anything else."""
        return exchange.calls * self.time(exchange.messages, exchange.received)


@dataclass(frozen=True)
class Exchange:
    """A collective that is called `calls` times in a step."""

    kind: str
    ranks: int
    size: float
    """Bytes of one rank's input tensor (of the collective, before it); for a reduce-scatter, of one rank's result."""
    calls: int

    @property
    def received(self) -> float:
        """Bytes that each rank receives per call. An all-reduce counts as a reduce-scatter and an all-gather."""
        others = self.ranks - 1
        if self.kind == ALL_REDUCE:
            return 2 * others / self.ranks * self.size
        if self.kind == ALL_TO_ALL:
            return others / self.ranks * self.size
        return self.size if self.kind == SEND else others * self.size

    @property
    def messages(self) -> int:
        """The number of sequential messages per call: log2 of the ranks, rounded up, to reach all of them."""
        depth = (self.ranks - 1).bit_length()
        return 2 * depth if self.kind == ALL_REDUCE else depth
