"""An attention as found in a graph: what is summed, over which axes, and what hides keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from ..algebra.terms import Dim, Read, Term
from .functions import Function
from .packed import Packed
from .padded import Padding
from .summands import Mask, Sink


@dataclass(frozen=True)
class Score:
    """One summand of the scores: `scale * sum over summed of query * key`."""

    query: Term
    key: Term
    summed: Dim
    scale: float


@dataclass(frozen=True)
class Opaque:
    """Weights that are more than a softmax of summed products and masks, or that something else reads.

    `products[i]` is the whole tensor of score i. `reader` is what reads the weights besides the product with the
    values, if anything does.
    """

    weights: Read
    products: tuple[Read, ...]
    reader: fx.Node | None = None
    function: Function | str = ""
    """What is done to each score by itself before the softmax, or the reason why it is no such function."""
    added: tuple[tuple[Term, ...], ...] = ()
    """What each product's tensor holds besides the product, because the op that multiplied also added it."""


@dataclass(frozen=True)
class Attention:
    """`node = softmax(sum of scores + masks) @ value`, over axes; `sinks` are scores of further keys without values.

    `dims` are the axes of the node's dimensions; `rows` all axes of the scores except the keys'. `queries` are the rows
    that form the query dimension, where the op has one (SDPA). `causal` refers to it: query i sees keys up to i.
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
    """The log-sum-exp of those scores of keys without values that are plain numbers."""
    queries: Dim | None = None
    causal: bool = False
    strict_rows: bool = False
    """Whether a row that is masked everywhere is NaN, as in a plain softmax, rather than 0, as in SDPA. With sinks it
    is 0 as well, unless they are -inf too."""
    numbers: bool = False
    """Whether a row with a score that is NaN or inf is 0, rather than NaN."""
    opaque: Opaque | None = None
    """Set where the weights are such: what stays as it is between the two products."""
    padding: Padding | None = None
    """Set where values were padded to the width of the keys: `dims` includes the padding, all other fields do not."""
    packed: Packed | None = None
    """Set where queries and keys belong to several sequences, one behind the other."""
    heads_apart: tuple[Attention, ...] = ()
    """Where the heads that are the first of its rows are computed one by one, the attention of each."""

    @property
    def shared(self) -> bool:
        """Whether keys without values take part."""
        return bool(self.sinks) or self.share > -math.inf
