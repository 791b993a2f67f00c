"""Which keys a block of queries sees, so that no work is done for keys that none of them sees.

Key positions are a `range` where they are consecutive, else an index tensor `[keys]` (int64): a padded batch, a static
cache and a sliding window give ranges, a top-k selection gives an index. The values of a mask are read only on CPU;
elsewhere reading them would stall the device, so every key under the causal limit is loaded, and hidden ones are
blanked after loading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

KeyPositions = range | Tensor

_QUERIES_AT_A_TIME = 512  # bounds the bool intermediate of `keys`: 512 B per key and head of the mask


def take(tensor: Tensor, keys: KeyPositions, dim: int) -> Tensor:
    """The given positions of one dim: a view for a range, a copy for an index."""
    if isinstance(keys, range):
        return tensor.narrow(dim, keys.start, len(keys))
    return tensor.index_select(dim, keys)


def split(keys: KeyPositions, size: int) -> Iterator[KeyPositions]:
    """The same positions in order, at most `size` at a time."""
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


def positions(seen: Tensor) -> KeyPositions:
    """Where a bool tensor `[T]` is True."""
    index = seen.nonzero().flatten()
    if not len(index):
        return range(0)
    first, last = int(index[0]), int(index[-1])
    return range(first, last + 1) if last - first + 1 == len(index) else index


def causal_stop(causal_offset: int | None, queries: range, tokens: int) -> int:
    """One more than the last key that the last of the queries may see."""
    return tokens if causal_offset is None else min(max(queries.stop + causal_offset, 0), tokens)


def part_of(mask: Tensor | None, sequences: slice, heads: slice, keys: slice = slice(None)) -> Tensor | None:
    """The part of a mask `[B|1, N|1, Sq|1, T|1]` for some sequences, heads and keys."""
    if mask is None:
        return None
    whole, (b, n, _, t) = slice(None), mask.shape
    return mask[sequences if b != 1 else whole, heads if n != 1 else whole, :, keys if t != 1 else whole]


def reads_values(mask: Tensor) -> bool:
    """Whether the mask's values can be read without a device synchronisation."""
    return mask.is_cpu


@dataclass(frozen=True)
class Visibility:
    """What the queries of one or more sequences may attend to."""

    mask: Tensor | None
    """Bool (True = attend) or floating (a bias), `[B or 1, N or 1, Sq or 1, T or 1]`; None hides nothing."""
    causal_offset: int | None
    """Query i sees keys j <= i + causal_offset; None is no limit."""
    tokens: int
    """T."""
    device: torch.device

    def keys(self, queries: range) -> KeyPositions:
        """The keys that at least one of the queries sees."""
        seen = range(causal_stop(self.causal_offset, queries, self.tokens))
        if self.mask is None or self.mask.dtype != torch.bool or not reads_values(self.mask):
            return seen
        return positions(~self.hidden_from_all(self.mask, queries, seen).all(0))

    def blanks(self, queries: range, keys: KeyPositions) -> Tensor | None:
        """Which of the loaded keys no query sees, bool `[B or 1, keys]`; None where such keys are not loaded."""
        if self.mask is None or self.mask.dtype != torch.bool or reads_values(self.mask):
            return None
        return self.hidden_from_all(self.mask, queries, keys)

    def bias(self, queries: range, keys: KeyPositions, dtype: torch.dtype) -> Tensor | None:
        """What to add to the scores, `[B or 1, N or 1, queries or 1, keys]`, -inf where hidden; None for nothing."""
        if self.mask is None:
            causal = self._causal(queries, keys)
            return None if causal is None else _hide(causal, dtype)
        if self.mask.dtype == torch.bool:
            allowed = self._allowed(self.mask, queries, keys)
            return None if reads_values(allowed) and bool(allowed.all()) else _hide(allowed, dtype)
        bias = self._mask(self.mask, queries, keys).to(dtype)
        causal = self._causal(queries, keys)
        return bias if causal is None else bias.masked_fill(~causal, -torch.inf)

    def _mask(self, mask: Tensor, queries: range, keys: KeyPositions) -> Tensor:
        if mask.shape[2] != 1:
            mask = mask.narrow(2, queries.start, len(queries))
        return take(mask.expand(-1, -1, -1, self.tokens), keys, 3)

    def _causal(self, queries: range, keys: KeyPositions) -> Tensor | None:
        """Bool `[1, 1, len(queries), keys]`, True = attend; None if the causal limit hides nothing here."""
        if self.causal_offset is None:
            return None
        first_limit = queries.start + self.causal_offset
        if isinstance(keys, range) and keys.stop - 1 <= first_limit:
            return None
        limits = torch.arange(first_limit, first_limit + len(queries), device=self.device)
        positions = torch.arange(keys.start, keys.stop, device=self.device) if isinstance(keys, range) else keys
        return (positions <= limits[:, None])[None, None]

    def _allowed(self, mask: Tensor, queries: range, keys: KeyPositions) -> Tensor:
        causal = self._causal(queries, keys)
        allowed = self._mask(mask, queries, keys)
        return allowed if causal is None else allowed & causal

    def hidden_from_all(self, mask: Tensor, queries: range, keys: KeyPositions) -> Tensor:
        """Keys that the mask and the causal limit hide from every query, bool `[B or 1, keys]`."""
        hidden = mask.new_ones((mask.shape[0], len(keys)))
        for start in range(queries.start, queries.stop, _QUERIES_AT_A_TIME):
            some = range(start, min(start + _QUERIES_AT_A_TIME, queries.stop))
            hidden &= ~self._allowed(mask, some, keys).any(2).any(1)
        return hidden


def _hide(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return allowed.new_zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -torch.inf)
