"""What ranks that share out keys agree on, so that all choose the same exchange: nothing that one of them measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from mla_compile.cost import Device, Link, cost_of, predicted_seconds

from ..mla.site import Site
from .exchange import Exchange, OutsideOfWeights

NOTHING, PROGRAM, MASKS, QUERIES = SAME = "nothing", "program", "masks", "queries"
"""What the ranks of a group that gathers keys have in common: each says what the one before says, and more."""

Hints = Mapping[sympy.Symbol, int]


@dataclass(frozen=True)
class Agreement:
    """What holds for all ranks of a group."""

    same: str = NOTHING
    """One of `SAME`."""
    stay: bool = False
    """Whether keys stay on their ranks wherever they can, however many bytes are exchanged instead."""
    link: Link | None = None
    """The link between them; None if it is not known."""
    device: Device | None = None
    """The rates of the device of each; None if these are not known to be the same."""

    def fastest(self, exchanges: Sequence[Exchange], site: Site, hints: Hints) -> Exchange:
        """The exchange that takes the least time; the first one where the link or the sizes are not known."""
        sizes = {name: sympy.sympify(size).subs(hints) for name, size in site.sizes.items()}
        if self.link is None or not all(size.is_number for size in sizes.values()):
            return exchanges[0]
        element_size = site.node.meta["val"].element_size()
        times = {exchange: self._seconds(exchange, sizes, element_size) for exchange in exchanges}
        return min(times, key=lambda exchange: times[exchange])

    def _seconds(self, exchange: Exchange, sizes: Mapping[str, sympy.Expr], element_size: int) -> float:
        """The time of an exchange, and of what ranks compute for one another only because of it."""
        assert self.link is not None
        messages = exchange.calls * (exchange.ranks - 1).bit_length()
        seconds = self.link.time(messages, float(exchange.received(sizes, element_size)))
        if not isinstance(exchange, OutsideOfWeights):
            return seconds
        if self.device is None:
            return float("inf")
        s, others = sizes, exchange.ranks - 1
        weights = others * s["N"] * s["L"] * (s["P"] + s["V"])
        return seconds + predicted_seconds(cost_of(s["B"] * s["Sq"] * weights, weights, element_size), self.device)


NO_AGREEMENT = Agreement()
