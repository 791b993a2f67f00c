"""What ranks that share out keys agree on, so that all exchange the same: nothing that one of them measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from mla_compile.cost import Device, Link, cost_of, predicted_seconds

from ..mla.site import Site
from .exchange import Exchange, OutsideOfWeights

NOTHING, PROGRAM, MASKS, QUERIES = SAME = "nothing", "program", "masks", "queries"
"""What all ranks of a group have the same of that gathers keys: each says what the one before says, and more."""

Hints = Mapping[sympy.Symbol, int]


@dataclass(frozen=True)
class Agreement:
    """What is said of all ranks of a group."""

    same: str = NOTHING
    """One of `SAME`."""
    stay: bool = False
    """Whether keys stay on their ranks wherever they can, however many bytes are exchanged instead."""
    link: Link | None = None
    """What joins them; None if that is not known."""
    device: Device | None = None
    """The rates of each of their devices; None if these are not known to be the same."""

    def fastest(self, exchanges: Sequence[Exchange], site: Site, hints: Hints) -> Exchange:
        """That of least time; the first of them where the link is not known, or sizes are not."""
        sizes = {name: sympy.sympify(size).subs(hints) for name, size in site.sizes.items()}
        if self.link is None or not all(size.is_number for size in sizes.values()):
            return exchanges[0]
        element_size = site.node.meta["val"].element_size()
        times = {exchange: self._seconds(exchange, sizes, element_size) for exchange in exchanges}
        return min(times, key=lambda exchange: times[exchange])

    def _seconds(self, exchange: Exchange, sizes: Mapping[str, sympy.Expr], element_size: int) -> float:
        """Of the exchange, and of what its ranks compute for one another and would not otherwise."""
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
