"""The layers of each group of devices under pipeline parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .model import Layer, Model


@dataclass(frozen=True)
class Stage:
    """Consecutive layers."""

    kinds: tuple[tuple[Layer, int], ...]
    """The distinct layers, and how many there are of each."""
    first: bool
    """Whether the stage has the embedding."""
    last: bool
    """Whether the stage has the head."""

    @property
    def layers(self) -> int:
        return sum(count for _, count in self.kinds)

    @property
    def routed(self) -> int:
        """The number of layers with routed experts."""
        return sum(count for layer, count in self.kinds if layer.expert)


def stages(model: Model, count: int) -> Iterator[Stage]:
    """The stages as vLLM makes them: remaining layers go to the stages just before the last, one each."""
    least, over = divmod(len(model.layers), count)
    begin = 0
    for i in range(count):
        end = begin + least + (count - 1 - over <= i < count - 1)
        yield Stage(tuple(Counter(model.layers[begin:end]).items()), i == 0, i == count - 1)
        begin = end
