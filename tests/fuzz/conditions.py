"""Random conditions on queries and keys: bool tensors that broadcast to `[B, N, Sq, T]`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, arange

from .drawing import Choices, Sizes

DEPTH = 3
"""How many conditions that are made of others may be inside one another."""
COMPARISONS = (operator.le, operator.lt, operator.ge, operator.gt)


@dataclass
class MaskChoices(Choices):
    """Random choices, and the tensors that masks are made of."""

    sizes: Sizes
    lengths: Tensor
    """`[B]`, of 0 up to T."""
    padding: Tensor
    """Int64 `[B, T]`: 1 for keys that are no padding."""
    positions: Tensor
    """`[B, Sq]`, of 0 up to T - 1."""
    indexer: Tensor
    """Float64 `[B, Sq, T]`: scores that choose keys."""
    depth: int = 0
    """How many conditions the one that is drawn is a part of."""

    def condition(self) -> Tensor:
        self.depth += 1
        drawn = self.one_of(CONDITIONS + COMBINED if self.depth <= DEPTH else CONDITIONS)
        self.depth -= 1
        return drawn

    def keys(self) -> Tensor:
        """Positions of keys, `[T]`."""
        return self.one_of(KEYS)

    def queries(self) -> Tensor:
        """Positions of queries, `[Sq, 1]` or `[B, 1, Sq, 1]`."""
        return self.one_of(QUERIES)

    def number(self) -> int | Tensor:
        """What positions are compared with."""
        return self.choice([0, 1, 2, -1, self.sizes.keys // 2, self.lengths[:, None, None, None]])

    def compared(self, left: Tensor, right: int | Tensor) -> Tensor:
        return self.choice(COMPARISONS)(left, right)

    def ones(self, rows: int, columns: int) -> Tensor:
        return torch.ones(rows, columns, dtype=torch.bool)


def counted(draw: MaskChoices) -> Tensor:
    return arange(draw.sizes.keys)


def end_of_more(draw: MaskChoices) -> Tensor:
    before = draw.below(4)
    return arange(draw.sizes.keys + before)[before:]


def row_of_keys(draw: MaskChoices) -> Tensor:
    before, rows, keys = draw.below(4), draw.choice([1, 2]), draw.sizes.keys
    return arange(before + rows * keys)[before:].view(rows, keys)[draw.below(rows)]


def backwards(draw: MaskChoices) -> Tensor:
    return arange(draw.sizes.keys - 1, -1, -1)


def summed(draw: MaskChoices) -> Tensor:
    return torch.ones(draw.sizes.keys, dtype=torch.int64).cumsum(0) - draw.below(3)


def every_second(draw: MaskChoices) -> Tensor:
    return arange(2 * draw.sizes.keys)[::2]


def even(draw: MaskChoices) -> Tensor:
    return arange(0, 2 * draw.sizes.keys, 2)


KEYS = (counted, end_of_more, row_of_keys, backwards, summed, every_second, even)


def last(draw: MaskChoices) -> Tensor:
    return (arange(draw.sizes.queries) + draw.sizes.keys - draw.sizes.queries)[:, None]


def last_of_keys(draw: MaskChoices) -> Tensor:
    return arange(draw.sizes.keys)[draw.sizes.keys - draw.sizes.queries :][:, None]


def of_a_tensor(draw: MaskChoices) -> Tensor:
    return draw.positions[:, None, :, None]


def row_of_queries(draw: MaskChoices) -> Tensor:
    before = draw.below(4)
    return arange(before + 2 * draw.sizes.queries)[before:].view(2, -1)[1][:, None]


def flipped(draw: MaskChoices) -> Tensor:
    return arange(draw.sizes.queries).flip(0)[:, None]


def before_lengths(draw: MaskChoices) -> Tensor:
    return (draw.lengths[:, None] - draw.sizes.queries + arange(draw.sizes.queries))[:, None, :, None]


QUERIES = (last, last_of_keys, of_a_tensor, row_of_queries, flipped, before_lengths)


def causal(draw: MaskChoices) -> Tensor:
    return draw.keys() <= draw.queries()


def keys_against_queries(draw: MaskChoices) -> Tensor:
    return draw.compared(draw.keys(), draw.queries() + draw.choice([0, 1, -1, 2]))


def blocks_of_two(draw: MaskChoices) -> Tensor:
    return draw.choice([operator.le, operator.eq])(draw.keys() // 2, draw.queries() // 2)


def up_to_lengths(draw: MaskChoices) -> Tensor:
    return draw.keys() < draw.lengths[:, None, None, None]


def no_padding(draw: MaskChoices) -> Tensor:
    return draw.padding[:, None, None].bool() if draw.happens(0.5) else (draw.padding != 0)[:, None, None, :]


def keys_against_a_number(draw: MaskChoices) -> Tensor:
    return draw.compared(draw.keys() * draw.choice([1, 2, -1]), draw.number())


def queries_against_a_number(draw: MaskChoices) -> Tensor:
    return draw.compared(draw.queries(), draw.number())


def lower_triangle(draw: MaskChoices) -> Tensor:
    return draw.ones(draw.sizes.queries, draw.sizes.keys).tril(draw.below(draw.sizes.keys + 1) - 1)


def not_upper_triangle(draw: MaskChoices) -> Tensor:
    return ~draw.ones(draw.sizes.queries, draw.sizes.keys).triu(draw.below(draw.sizes.keys))


def part_of_a_triangle(draw: MaskChoices) -> Tensor:
    """Rows and columns of a larger triangle."""
    before, queries, keys = draw.below(3), draw.sizes.queries, draw.sizes.keys
    whole = draw.ones(before + 2 * queries, keys + 1).tril(draw.below(2))
    half = whole[before:].view(2, queries, keys + 1)[draw.below(2)]
    return half[:, draw.below(2) :][:, :keys]


def best_keys(draw: MaskChoices) -> Tensor:
    best = draw.indexer.topk(min(3, draw.sizes.keys), -1).indices
    return torch.zeros(draw.indexer.shape, dtype=torch.bool).scatter(-1, best, True)[:, None]


def positive_keys(draw: MaskChoices) -> Tensor:
    """What is scattered is a tensor, in the order of the keys' scores."""
    scores, order = draw.indexer.sort(-1)
    return torch.zeros(draw.indexer.shape, dtype=torch.bool).scatter(-1, order, scores > 0)[:, None]


CONDITIONS = (
    causal,
    keys_against_queries,
    keys_against_queries,
    blocks_of_two,
    up_to_lengths,
    no_padding,
    keys_against_a_number,
    queries_against_a_number,
    lower_triangle,
    not_upper_triangle,
    part_of_a_triangle,
    best_keys,
    positive_keys,
)


def both(draw: MaskChoices) -> Tensor:
    return draw.condition() & draw.condition()


def either(draw: MaskChoices) -> Tensor:
    return draw.condition() | draw.condition()


def inverted(draw: MaskChoices) -> Tensor:
    return ~draw.condition()


def chosen(draw: MaskChoices) -> Tensor:
    return torch.where(draw.condition(), draw.condition(), torch.zeros((), dtype=torch.bool))


COMBINED: tuple[Callable[[MaskChoices], Tensor], ...] = (both, either, inverted, chosen)
