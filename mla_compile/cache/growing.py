"""`LatentCache`: a replacement for transformers' `DynamicCache` that is written in place.

A `DynamicCache` copies its whole content at each step. Here each layer has room for more tokens than it holds, and a
step appends to them in place. Only a full cache is copied, to twice the room.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicIndexedLayer, DynamicLayer

from ..errors import CacheMismatchError
from .pool import check_count
from .room import Room, check_sizes


class GrowingLayer(DynamicLayer):
    """The keys and values of one layer, in buffers. Setting them replaces the buffers by others of as many tokens.

    Raises, where they are set: CacheMismatchError for another number of tokens.
    """

    def __init__(self, room: Room, index: int) -> None:
        self._room, self._index = room, index
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.is_initialized = False

    @property
    def keys(self) -> Tensor | None:
        """`[B, H, T, L]`; None before the first token."""
        return self._room.filled(self._index, self._keys)

    @keys.setter
    def keys(self, tensor: Tensor | None) -> None:
        self._check_count(tensor)
        self._keys = tensor

    @property
    def values(self) -> Tensor | None:
        """`[B, H, T, R]`; None before the first token."""
        return self._room.filled(self._index, self._values)

    @values.setter
    def values(self, tensor: Tensor | None) -> None:
        self._check_count(tensor)
        self._values = tensor

    @property
    def batch_size(self) -> int:
        """The number of sequences; -1 before the first token."""
        return -1 if self._keys is None else self._keys.shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Required by transformers; buffers are allocated only when the first token is written."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys `[B, H, S, L]` and values `[B, H, S, R]`, and return those of all T tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        check_sizes(self._keys, key_states)
        check_sizes(self._values, value_states)
        self._room.extend(self._index, key_states.shape[-2])
        self._keys = self._room.put(self._keys, key_states)
        self._values = self._room.put(self._values, value_states)
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """The number of tokens of each sequence."""
        return self._room.holds(self._index)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens (in transformers the number is negative), in place."""
        if tokens_to_remove > 0:
            raise CacheMismatchError(f"expected a negative number of tokens to remove, found {tokens_to_remove}")
        self._room.crop(self._index, -tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens, and the buffers with them."""
        self._room.reset(self._index)
        self._keys = self._values = None
        self.is_initialized = False  # transformers 5.17 keeps what is, filled with zeros
        super().reset()

    def _check_count(self, tensor: Tensor | None) -> None:
        count = self._room.holds(self._index)
        if tensor is not None and tensor.shape[-2] != count:
            found = f"found {tensor.shape[-2]}: crop the cache, or update it"
            raise CacheMismatchError(f"expected the {count} tokens of layer {self._index}, {found}")


class GrowingIndexedLayer(GrowingLayer, DynamicIndexedLayer):
    """A `GrowingLayer` with an indexer, whose keys grow in the same way."""

    def __init__(self, room: Room, index: int, indexer_room: Room) -> None:
        super().__init__(room, index)
        self._indexer_room = indexer_room
        self._indexer_keys: Tensor | None = None
        self.indexer_position_ids: Tensor | None = None
        self.is_indexer_initialized = False

    @property
    def indexer_keys(self) -> Tensor | None:
        """`[B, T, I]`; None before the first token."""
        return self._indexer_room.filled(self._index, self._indexer_keys)

    @indexer_keys.setter
    def indexer_keys(self, tensor: Tensor | None) -> None:
        self._indexer_keys = tensor

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append keys `[B, S, I]` of the indexer, and return those of all T tokens."""
        self.is_indexer_initialized = True
        check_sizes(self._indexer_keys, indexer_key_states)
        self._indexer_room.extend(self._index, indexer_key_states.shape[-2])
        self._indexer_keys = self._indexer_room.put(self._indexer_keys, indexer_key_states)
        assert self.indexer_keys is not None
        return self.indexer_keys

    def crop(self, tokens_to_remove: int) -> None:
        """As in the base class, and for the indexer's keys and positions."""
        super().crop(tokens_to_remove)
        self._indexer_room.crop(self._index, -tokens_to_remove)
        if tokens_to_remove and self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :tokens_to_remove]

    def reset(self) -> None:
        """Forget all tokens, and the buffers with them."""
        self._indexer_room.reset(self._index)
        self._indexer_keys = self.indexer_position_ids = None
        self.is_indexer_initialized = False
        super().reset()


class LatentCache(DynamicCache):
    """A `DynamicCache` that is written in place: `model.generate(**inputs, past_key_values=LatentCache.of(model))`.

    It behaves like a `DynamicCache`, eager and compiled, but a step reads the cache without copying it, except where
    gradients are enabled, so that a backward may go through several steps. In each step every layer takes part, once.
    Layers that do not hold all tokens (sliding windows, states of linear attention) stay transformers' own.

    Args: config, of a transformers model; tokens, the number per sequence for which there is room from the start.
    Raises, where it is written: CacheMismatchError for another batch than before, or if a layer was left out of a step,
    writes another number of tokens than the others, or was cropped alone.
    """

    def __init__(self, config: Any, tokens: int = 0) -> None:
        super().__init__(config=config)
        if tokens:
            check_count("tokens", tokens)
        room, indexer_room = Room(tokens), Room(tokens)
        for i, layer in enumerate(self.layers):
            if type(layer) is DynamicIndexedLayer:
                self.layers[i] = GrowingIndexedLayer(room, i, indexer_room)
            elif type(layer) is DynamicLayer:
                self.layers[i] = GrowingLayer(room, i)

    @classmethod
    def of(cls, model: nn.Module, tokens: int = 0) -> LatentCache:
        """An empty cache for a transformers model, with room for `tokens` tokens per sequence from the start.

        Raises: CacheMismatchError if the model has no configuration that says what its layers are.
        """
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "get_text_config"):
            raise CacheMismatchError(f"expected a transformers model with a config, found {type(model).__name__}")
        return cls(config, tokens)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_seq_length()} tokens in {len(self.layers)} layers)"

    def fork(self) -> LatentCache:
        """A copy of the cache, with its own buffers, that continues the same sequences independently."""
        return copy.deepcopy(self)
