"""The layers that a group of devices has under pipeline parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .model import Layer, Model


@dataclass(frozen=True)
class Stage:
    """Some layers one behind the other."""

    kinds: tuple[tuple[Layer, int], ...]
    """Layers that are alike, and how many of them."""
    first: bool
    """Whether the embedding is before them."""
    last: bool
    """Whether the head is after them."""

    @property
    def layers(self) -> int:
        return sum(count for _, count in self.kinds)

    @property
    def routed(self) -> int:
        """Layers with routed experts."""
        return sum(count for layer, count in self.kinds if layer.expert)


def stages(model: Model, count: int) -> Iterator[Stage]:
    """As vLLM shares layers out: what is over goes to stages before the last, one each."""
    least, over = divmod(len(model.layers), count)
    begin = 0
    for i in range(count):
        end = begin + least + (count - 1 - over <= i < count - 1)
        yield Stage(tuple(Counter(model.layers[begin:end]).items()), i == 0, i == count - 1)
        begin = end
