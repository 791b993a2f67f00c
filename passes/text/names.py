"""One letter for each axis: `b s n t l p r v` for those whose role a site tells, `i j k ...` for all others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from ..algebra.sizes import Size
from ..algebra.terms import Axis, Dim
from ..mla.site import Site

_OTHERS = "ijkmuwxyz"
"""For axes without a role."""


class Names:
    """A name for each axis: that of its role, if it has one, else the next free letter, given when first asked for."""

    def __init__(self, roles: Mapping[str, Dim] | None = None) -> None:
        self._names: dict[Axis, str] = {}
        for role, axes in (roles or {}).items():
            for number, axis in enumerate(axes):
                self._names.setdefault(axis, role if len(axes) == 1 else f"{role}{number}")
        free = (letter if not lap else f"{letter}{lap}" for lap in count() for letter in _OTHERS)
        self._free = free

    def __call__(self, axis: Axis) -> str:
        """The name of an axis."""
        if axis not in self._names:
            self._names[axis] = next(self._free)
        return self._names[axis]

    def index(self, axes: Dim) -> str:
        """The index into a dimension of these axes, in terms of their names, slowest first."""
        words = self(axes[0]) if axes else "0"
        for axis in axes[1:]:
            words = f"{factor(words)} * {axis.size} + {self(axis)}"
        return words

    def shape(self, dims: Iterable[Dim]) -> str:
        """The indices of a tensor's dimensions."""
        return f"[{', '.join(map(self.index, dims))}]"

    def sizes(self) -> dict[str, Size]:
        """The size of each axis that was given a name, by name."""
        return {name: axis.size for axis, name in self._names.items()}


def names_of(site: Site) -> Names:
    """The axes of a site by their roles: `b s n t` of the scores, `l` of the rank, `k` of that of the keys' own
    latent, `p`, `r` and `v` of a head."""
    ropes = tuple(axis for rope in (*site.ropes, *site.own_ropes) for axis in rope.summed)
    attention = site.attention
    return Names(
        {
            "b": site.batch,
            "s": site.tokens,
            "n": site.heads,
            "t": attention.keys,
            "l": site.rank,
            "k": () if site.second_latent is None else site.second_latent.rank,
            "v": attention.columns,
            "p": site.nope.summed,
            "r": ropes,
        }
    )


def factor(words: str) -> str:
    """An expression as a factor of a product."""
    return f"({words})" if " " in words else words


def short(value: Any) -> str:
    """A dtype, or another name of torch's, without the prefix `torch.`."""
    return str(value).removeprefix("torch.")
