"""The time of an exchange between devices: messages one behind the other, and bytes."""

from __future__ import annotations

from dataclasses import dataclass

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND = (
    *("all_reduce", "all_gather", "reduce_scatter"),
    *("all_to_all", "send"),
)


@dataclass(frozen=True)
class Link:
    """What joins any two devices."""

    bandwidth: float
    """Bytes/s that a device receives."""
    latency: float
    """Seconds until a message without bytes is there."""

    def seconds(self, exchange: Exchange) -> float:
        """Of all calls of an exchange, which nothing else goes on beside."""
        return exchange.calls * (exchange.messages * self.latency + exchange.received / self.bandwidth)


@dataclass(frozen=True)
class Exchange:
    """A collective that is called some times in a step."""

    kind: str
    ranks: int
    size: float
    """Bytes: of the tensor of a rank, before an all-gather and otherwise; of a rank's result after a reduce-scatter."""
    calls: int

    @property
    def received(self) -> float:
        """Bytes that each rank receives in a call: an all-reduce is a reduce-scatter and an all-gather."""
        others = self.ranks - 1
        if self.kind == ALL_REDUCE:
            return 2 * others / self.ranks * self.size
        if self.kind == ALL_TO_ALL:
            return others / self.ranks * self.size
        return self.size if self.kind == SEND else others * self.size

    @property
    def messages(self) -> int:
        """Messages one behind the other in a call: log2 of the ranks, to reach all of them."""
        depth = (self.ranks - 1).bit_length()
        return 2 * depth if self.kind == ALL_REDUCE else depth
