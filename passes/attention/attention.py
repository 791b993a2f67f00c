"""An attention as it was found: what is summed, over which axes, and what hides keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from ..algebra.terms import Dim, Read, Term
from .functions import Function
from .packed import Packed
from .padded import Padding
from .scores import Mask, Sink


@dataclass(frozen=True)
class Score:
    """One summand of the scores: `scale * sum over summed of query * key`."""

    query: Term
    key: Term
    summed: Dim
    scale: float


@dataclass(frozen=True)
class Opaque:
    """Weights that are some function of the products in `scores`: `products[i]` is the whole tensor of score i.

    `reader`, if there is one, is what else reads the weights.
    """

    weights: Read
    products: tuple[Read, ...]
    reader: fx.Node | None = None
    function: Function | str = ""
    """What is done to the products before the softmax, to each score by itself, or why it is no such function."""
    added: tuple[tuple[Term, ...], ...] = ()
    """What each product's tensor holds besides: an op added it that multiplied."""


@dataclass(frozen=True)
class Attention:
    """`node = softmax(sum of scores + masks) @ value`, over axes; `sinks` are scores of further keys, without value.

    `dims` are the axes of the node's dimensions; `rows` every axis of the scores but the keys'; `queries` the rows that
    are the query dimension where the op has one (SDPA), which is what `causal` speaks of: query i sees keys up to i.
    """

    node: fx.Node
    dims: tuple[Dim, ...]
    rows: Dim
    keys: Dim
    columns: Dim
    scores: tuple[Score, ...]
    value: Term
    masks: tuple[Mask, ...]
    sinks: tuple[Sink, ...] = ()
    share: float = -math.inf
    """The log-sum-exp of scores that are numbers, of further keys without value too."""
    queries: Dim | None = None
    causal: bool = False
    strict_rows: bool = False
    """Whether a row that is masked everywhere is NaN, as a plain softmax has it, and not 0, as SDPA has it. With sinks
    it is 0 as well, unless they are -inf, too."""
    numbers: bool = False
    """Whether a row of which some score is NaN or inf is 0, and not NaN."""
    opaque: Opaque | None = None
    """Where more happens to the scores than masks: what stays as it is between the two products."""
    padding: Padding | None = None
    """Where values were padded to the width of the keys: `dims` have its columns, all else those that are values."""
    packed: Packed | None = None
    """Where queries and keys are those of several sequences, one behind the other."""

    @property
    def shared(self) -> bool:
        """Whether keys without value take part."""
        return bool(self.sinks) or self.share > -math.inf
