"""The axis algebra: what a tensor's elements are, whatever views and copies stand between.

A tensor is described by a `Form`: every dimension is an ordered product of atomic axes (slowest first, so a merged
dimension `[B*T]` is the two axes `B, T`), and a `Term` says what the element at these axes is:

- a `Read` of a source tensor, each dimension of which is a product of digits: `start + step * axis`, or pinned;
- refined, if more is known, to a `Product` (a contraction of two terms), a `Sum` of terms, or a `Join` (pieces along
  one axis).

Layout operations only rename, split, restrict or reorder axes, so two spellings of one computation get equal terms. A
term also says, if it is known, how its element is stored: found through a table of pages (`Lookup`), or in few bits
with a scale (`Numbers`).

An axis that no term mentions is a broadcast. Axes of size 1 do not exist: their index is always 0.

Pure Python: no torch, no graphs. Sizes are ints or sympy expressions over integer symbols.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from .sizes import Size, product, same


@dataclass(frozen=True, eq=False)
class Axis:
    """One atomic index running over `size` values. Two axes are the same only if they are one object."""

    size: Size

    def __repr__(self) -> str:
        return f"Axis({self.size})@{id(self) & 0xFFFF:04x}"


Dim = tuple[Axis, ...]


@dataclass(frozen=True)
class Digit:
    """One factor of a source dimension, of `extent` values: `start + step * axis`, or `start` where `axis` is None.

    The slowest digit of a dimension also says how many indices of the dimension lie `before` and `after` those that
    its digits count.
    """

    axis: Axis | None
    extent: Size
    start: Size = 0
    step: int = 1
    before: Size = 0
    after: Size = 0

    @property
    def whole(self) -> bool:
        """Whether the axis runs over all of the digit's values in order."""
        if self.axis is None or self.step != 1:
            return False
        return same(self.axis.size, self.extent) and all(same(n, 0) for n in (self.start, self.before, self.after))


@dataclass(frozen=True)
class Bits:
    """A reinterpretation of a tensor's bits as `dtype`, which has the same width or, where each element is two, half of
    it: the fastest digit of the last dimension then counts these two."""

    dtype: Hashable


@dataclass(frozen=True)
class Half:
    """The number from 0 to 15 in the lower or the upper half of a byte."""

    upper: bool


@dataclass(frozen=True)
class Read:
    """Elements of `source`; `dims[i]` are the digits of its dimension i, slowest first.

    `then` is what was done to them afterwards, in order: a float multiplies, `Bits` reinterprets, `Half` takes a part
    of the bits, and anything else is the dtype of a cast.
    """

    source: Hashable
    dims: tuple[tuple[Digit, ...], ...]
    then: tuple[Hashable, ...] = ()

    @property
    def digits(self) -> tuple[Digit, ...]:
        """The digits of all dimensions, in order."""
        return tuple(digit for dim in self.dims for digit in dim)

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset(digit.axis for dim in self.dims for digit in dim if digit.axis is not None)

    @property
    def whole(self) -> bool:
        """Whether all elements of the source are read."""
        return all(digit.whole for digit in self.digits)

    @property
    def factors(self) -> tuple[float, ...]:
        """The numbers that the elements were multiplied by, in order."""
        return factors_in(self.then)


def factors_in(then: Iterable[Hashable]) -> tuple[float, ...]:
    """The multipliers among the steps of a `then`."""
    return tuple(step for step in then if isinstance(step, float))


@dataclass(frozen=True)
class Product:
    """`scale * sum over summed of left * right`."""

    left: Term
    right: Term
    summed: Dim
    scale: float = 1.0


@dataclass(frozen=True)
class Sum:
    """Terms added up."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Segment:
    """A piece of a `Join`: `term`, whose own axes along the join are `axes`, slowest first."""

    axes: Dim
    term: Term

    @property
    def size(self) -> Size:
        return product(axis.size for axis in self.axes)


@dataclass(frozen=True)
class Join:
    """Pieces concatenated along `axis`."""

    axis: Axis
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Undefined:
    """Memory that has not been written."""


@dataclass(frozen=True)
class Zero:
    """The number 0."""


@dataclass(frozen=True, eq=False)
class Unread:
    """A source that is not a tensor of the graph: what `node` is made of, such as a term of its sum, or its padding.

    Two are equal only if they are the same object, since a node may be made of several.
    """

    node: Hashable


class How(Enum):
    """What one tensor does to the elements of another: it multiplies or divides them; or, where it is True, lets them
    be or sets them to 0."""

    TIMES = "*"
    OVER = "/"
    WHERE = "where"
    UNLESS = "unless"


@dataclass(frozen=True)
class Scaled:
    """A source that is not a tensor of the graph: what `by` makes of the elements of `of`, with a dimension for each of
    `axes`."""

    of: Read
    by: Read
    axes: Dim
    how: How = How.TIMES


@dataclass(frozen=True)
class Stacked:
    """A source that is not a tensor of the graph: `pieces` along its first dimension, then a dimension for each of
    `axes`."""

    pieces: tuple[Read, ...]
    axes: Dim


@dataclass(frozen=True)
class Joined:
    """A source that is not a tensor of the graph: `pieces` concatenated along its first dimension, where each has
    its own axes `along`; then a dimension for each of `axes`."""

    pieces: tuple[Read, ...]
    along: tuple[Dim, ...]
    axes: Dim


@dataclass(frozen=True)
class Added:
    """A source that is not a tensor of the graph: `pieces` added up, with a dimension for each of `axes`."""

    pieces: tuple[Read, ...]
    axes: Dim


@dataclass(frozen=True)
class Contracted:
    """A source that is not a tensor of the graph: `sum over summed of left * right`, with a dimension for each of
    `axes`."""

    left: Read
    right: Read
    summed: Dim
    axes: Dim


@dataclass(frozen=True)
class Constant:
    """A source that is not a tensor of the graph: one number in the dtype of `like`, whose elements are not read,
    with a dimension for each of `axes`."""

    like: Read
    number: float
    axes: Dim


@dataclass(frozen=True)
class Named:
    """A source that is not a tensor of the graph: 1 where the element of `table`, over all of `axes` but the first, is
    the index on the first of `axes`, else 0, in the dtype of `like`, whose elements are not read. A negative number in
    the table counts from the end."""

    like: Read
    table: Read
    axes: Dim


@dataclass(frozen=True)
class Laid:
    """A source that is not a tensor of the graph: `of` with its axes `parts` flattened into the first dimension;
    then a dimension for each of `others`."""

    of: Read
    parts: Dim
    others: Dim


def made_of(source: Hashable) -> tuple[Read, ...]:
    """The reads that a source is computed from if it is not a tensor of the graph; none if it is one."""
    match source:
        case Scaled(of, by):
            return of, by
        case Stacked(pieces) | Joined(pieces) | Added(pieces):
            return pieces
        case Contracted(left, right):
            return left, right
        case Named(like, table):
            return like, table
        case Laid(of) | Constant(of):
            return (of,)
    return ()


@dataclass(frozen=True)
class Flat:
    """Flattened pages: index k of axis `keys` is `k // row.size` on `page`, the table's axis, and `k % row.size` on
    `row`, the pages' own."""

    keys: Axis
    page: Axis
    row: Axis


@dataclass(frozen=True)
class Lookup:
    """The element of `pages` whose index on axis `entry` is the element of `table`.

    `entry`, and the axes `page` and `row` of `flat`, are bound: no form has them. `wraps`: a negative number in the
    table counts from the end. `scales`, if given, multiply the element; if they run over `entry`, they are looked up
    likewise. `then` is what was done to the element afterwards, as in a `Read`.
    """

    pages: Read
    entry: Axis
    table: Read
    wraps: bool
    flat: Flat | None = None
    scales: Read | None = None
    then: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class Numbers:
    """An element `of * by`, `of` in e4m3fn or int8; `then` is what was done to the product after, as in a `Read`."""

    of: Read
    by: Read | None = None
    then: tuple[Hashable, ...] = ()

    @property
    def factor(self) -> float:
        """The product of all numbers that the elements were also multiplied by."""
        return math.prod(factors_in(self.then))


@dataclass(frozen=True)
class Lost:
    """Why it is no longer known what an element is made of: `reason`, and the node that is responsible, if one is."""

    reason: str
    node: Hashable = None


@dataclass(frozen=True)
class Term:
    """An element: how to read it from a tensor, and, if known, what it is made of.

    `stored` is how that tensor holds the element, and `joined` is what a plain read was put together from; both
    describe it before the steps of the read's `then`. `lost` is why no more is known of what it is made of.
    Comparisons ignore `lost` and `joined`.
    """

    read: Read
    parts: Product | Sum | Join | Undefined | Zero | None = None
    stored: Lookup | Numbers | None = None
    lost: Lost | None = field(default=None, compare=False)
    joined: Join | None = field(default=None, compare=False)

    @property
    def axes(self) -> frozenset[Axis]:
        """The axes that the element depends on. All other axes of a form are broadcast."""
        match self.parts:
            case Product(left, right, summed):
                return (left.axes | right.axes) - frozenset(summed)
            case Sum(terms):
                return frozenset[Axis]().union(*(term.axes for term in terms))
            case Join(axis, segments):
                inner = frozenset[Axis]().union(*(s.term.axes - set(s.axes) for s in segments))
                return inner | {axis}
            case Undefined() | Zero():
                return frozenset()
        return self.read.axes


@dataclass(frozen=True)
class Form:
    """A tensor: `dims[i]` are the axes of dimension i, slowest first; `term` the element at them."""

    dims: tuple[Dim, ...]
    term: Term

    @property
    def shape(self) -> tuple[Size, ...]:
        return tuple(product(axis.size for axis in dim) for dim in self.dims)
