"""`Mesh`: how many devices share what out, and all of them that there are for a number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """A way to share a model and its sequences out: over `tp * dp * pp` devices."""

    tp: int
    """Tensor parallelism: devices that share out heads and widths."""
    dcp: int
    """Decode context parallelism: of these, devices that share out the tokens of a cache."""
    dp: int
    """Data parallelism: groups of devices that share out sequences."""
    ep: int
    """Expert parallelism: devices, of one group or several, that share out whole experts; 1 where each has a part of
    every expert."""
    pp: int
    """Pipeline parallelism: groups that share out layers."""

    @property
    def devices(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def groups(self) -> int:
        """Groups of tensor parallelism that share experts, and with them one engine."""
        return max(1, self.ep // self.tp)

    @property
    def engines(self) -> int:
        """Engines that have nothing in common but who sends them requests."""
        return self.dp // self.groups

    def __str__(self) -> str:
        return f"TP {self.tp}, DCP {self.dcp}, DP {self.dp}, EP {self.ep}, PP {self.pp}"


def meshes(devices: int) -> Iterator[Mesh]:
    """Every mesh of so many devices: DCP divides TP, and experts are shared out by all devices of whole groups."""
    for tp in _divisors(devices):
        for pp in _divisors(devices // tp):
            dp = devices // tp // pp
            for ep in dict.fromkeys([1, *(tp * groups for groups in _divisors(dp))]):
                yield from (Mesh(tp, dcp, dp, ep, pp) for dcp in _divisors(tp))


def _divisors(number: int) -> list[int]:
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return small + [number // i for i in reversed(small) if i * i < number]
