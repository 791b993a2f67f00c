"""Indexer keys, which layers with an indexer cache beside latents: small, and kept in dense buffers that grow."""

from __future__ import annotations

from torch import Tensor

from .room import Room, check_sizes


class IndexerKeys:
    """The keys `[B, T, I]` of each layer that has its own indexer."""

    def __init__(self) -> None:
        self._room = Room(0)
        self._buffers: dict[int, Tensor] = {}

    def update(self, keys: Tensor, layer: int) -> Tensor:
        """Append keys `[B, S, I]` of a layer, and return those of all T tokens."""
        before = self._buffers.get(layer)
        check_sizes(before, keys)
        self._room.extend(layer, keys.shape[-2])
        buffer = self._room.put(before, keys)
        self._buffers[layer] = buffer
        return buffer.narrow(-2, 0, self._room.length)

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens."""
        for layer in self._buffers:
            self._room.crop(layer, count)

    def select(self, rows: Tensor) -> IndexerKeys:
        """A copy that holds the keys of sequences `rows`."""
        other = type(self)()
        for layer, buffer in self._buffers.items():
            other.update(buffer.narrow(-2, 0, self._room.length).index_select(0, rows.to(buffer.device)), layer)
        return other
