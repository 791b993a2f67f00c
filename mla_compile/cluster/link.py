"""The time of an exchange between devices: messages one behind the other, and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from .. import cost

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND = (
    *("all_reduce", "all_gather", "reduce_scatter"),
    *("all_to_all", "send"),
)


class Link(cost.Link):
    """What joins any two devices, for exchanges."""

    def seconds(self, exchange: Exchange) -> float:
        """Of all calls of an exchange, which nothing else goes on beside."""
        return exchange.calls * self.time(exchange.messages, exchange.received)


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
