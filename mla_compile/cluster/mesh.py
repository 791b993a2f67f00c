"""`Mesh`: the sizes of each kind of parallelism, and all meshes of a number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sympy import divisors


@dataclass(frozen=True)
class Mesh:
    """A way to split a model and its sequences over `tp * dp * pp` devices."""

    tp: int
    """Tensor parallelism: the number of devices over which heads and widths are split."""
    dcp: int
    """Decode context parallelism: the number of these devices over which the tokens of a cache are split."""
    dp: int
    """Data parallelism: the number of groups over which sequences are split."""
    ep: int
    """Expert parallelism: the number of devices, of one or several groups, over which whole experts are split; 1 if
    each device has a part of every expert."""
    pp: int
    """Pipeline parallelism: the number of groups over which layers are split."""

    @property
    def devices(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def groups(self) -> int:
        """The number of tensor-parallel groups that share experts, and so belong to one engine."""
        return max(1, self.ep // self.tp)

    @property
    def engines(self) -> int:
        """The number of independent engines."""
        return self.dp // self.groups

    def __str__(self) -> str:
        return f"TP {self.tp}, DCP {self.dcp}, DP {self.dp}, EP {self.ep}, PP {self.pp}"


def meshes(devices: int) -> Iterator[Mesh]:
    """All meshes of `devices`: DCP divides TP, and experts are split over all devices of whole groups or not."""
    for tp in divisors(devices):
        for pp in divisors(devices // tp):
            dp = devices // tp // pp
            for ep in dict.fromkeys([1, *(tp * groups for groups in divisors(dp))]):
                yield from (Mesh(tp, dcp, dp, ep, pp) for dcp in divisors(tp))
