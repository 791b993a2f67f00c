"""What scores are summed of: products of queries and keys, masks, and sinks."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from ..algebra.terms import Dim, Form, Term


@dataclass(frozen=True)
class Mask:
    """A tensor over some of the scores' axes.

    If it `attends` it is bool, True where a query may attend, or where it may not if `inverted`, and the scores that it
    rejects become `fill`. Otherwise it is added to the scores, times `factor`. To the softmax, what is added and less
    than `lowest` is -inf, and of a score to which at most `highest` is added nothing is left in the graph's dtype (None
    if that is not known). `word` is what a report calls the mask if nothing is known about which keys it hides.
    """

    term: Term
    attends: bool
    factor: float = 1.0
    fill: float = -math.inf
    inverted: bool = False
    lowest: float = -math.inf
    highest: float | None = None
    word: str = "tensor"

    def held(self, number: float) -> float:
        """The number as the softmax sees it: the lowest of a dtype overflows to -inf when multiplied, which gives NaN
        in a row of nothing else."""
        return -math.inf if number < self.lowest else number


@dataclass(frozen=True)
class Sink:
    """Scores, `factor * term`, of keys that have no value and only take their share of the weights.

    `keys` are the axes of these keys, which nothing else has.
    """

    term: Term
    factor: float
    keys: Dim = ()


@dataclass(frozen=True)
class Number:
    """The score of a key that has no value, or the log-sum-exp of several: the same in all rows."""

    score: float


@dataclass(frozen=True)
class Factor:
    """A tensor by which a product of the scores is multiplied, or divided if it `divides`; `labels` as in a `Summand`.

    It is the same for all keys.
    """

    form: Form
    labels: tuple[Hashable, ...]
    divides: bool


@dataclass(frozen=True)
class Summand:
    """A part of the scores: a product, `what` being its scale, or a mask, a sink or a number.

    `labels` say which dimensions of the scores its dimensions are; a sink's keys are one that no other summand has. A
    number has no form of its own but that of the scores.
    """

    form: Form
    labels: tuple[Hashable, ...]
    what: float | Mask | Sink | Number
    factors: tuple[Factor, ...] = ()
    """What multiplies a product besides its scale."""
    added: tuple[Form, ...] = ()
    """What the op that computes a product adds to it, over dimensions of the same `labels`."""
