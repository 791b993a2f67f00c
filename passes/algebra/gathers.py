"""Reads through a table: `pages[block_table]` in its spellings, and the same with pages laid one behind the other.

    node[b, n, r, w] = pages[table[b, n], r, w]                              a lookup
    node[b, t, w]    = pages[table[b, t // page_size], t % page_size, w]     its flat form

The form of such a node is a leaf: what it is made of is kept beside, as a `Lookup` over the leaf's axes.

Pure Python, like `operations`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from .operations import align, expand, fresh, piece_of, read_of
from .sizes import Unaligned, product, same
from .substitution import Change, Slice, change_read
from .terms import Axis, Dim, Form, Read, Term


@dataclass(frozen=True)
class Flat:
    """Axis `keys` is `key // row.size` on `page`, the table's axis, and `key % row.size` on `row`, the pages' own."""

    keys: Axis
    page: Axis
    row: Axis


@dataclass(frozen=True)
class Lookup:
    """The element of `pages` whose index on axis `entry` is the element of `table`.

    `wraps`: a negative number in the table counts from the end. `scales`, if there are some, are looked up likewise and
    multiplied with it; `then` is what was done to it after, as in a `Read`.
    """

    pages: Read
    entry: Axis
    table: Read
    wraps: bool
    flat: Flat | None = None
    scales: Read | None = None
    then: tuple[Hashable, ...] = ()


def look_up(node: Hashable, source: Form, dim: int, index: Form, wraps: bool) -> tuple[Form, Lookup]:
    """The tensor `node`: `source` with its dimension `dim` replaced by those of `index`.

    Raises: Unaligned, if that dimension is not one axis.
    """
    source, index = fresh(source), fresh(index)
    dims = (*source.dims[:dim], *index.dims, *source.dims[dim + 1 :])
    return _lookup(node, dims, source, dim, index, wraps)


def gather(node: Hashable, source: Form, dim: int, index: Form) -> tuple[Form, Lookup]:
    """The tensor `node`: the element of `source` at its own index, but with that of `index` in place of the `dim`-th.

    Raises: Unaligned, if that dimension is not one axis, or of another dimension not all is taken.
    """
    labels = [[i if i != dim else "entry" for i in range(len(source.dims))], range(len(index.dims))]
    if any(not same(a, b) for i, (a, b) in enumerate(zip(source.shape, index.shape, strict=True)) if i != dim):
        raise Unaligned("a lookup in a part of a tensor")
    shape = index.shape
    (source, index), axes = align([source, index], labels)
    dims = tuple(axes[i] for i in range(len(shape)))
    return _lookup(node, expand(Form(dims, index.term), shape).dims, source, dim, index, wraps=False)


def by_position(node: Hashable, source: Form, page: Form, lookup: Lookup) -> tuple[Form, Lookup]:
    """The tensor `node`: the token at each position of pages `source`, whose first dimensions are pages and rows.

    `page` is, for each position, the entry of a table `lookup.pages` at the position divided by the rows of a page.

    Raises: Unaligned, if the dimensions are not one axis each.
    """
    source = fresh(source)
    if len(source.dims[0]) != 1 or len(source.dims[1]) != 1 or len(page.dims[-1]) != 1 or source.term.read.then:
        raise Unaligned("pages, rows or positions that are not one axis")
    dims = (*page.dims, *source.dims[2:])
    flat = Flat(page.dims[-1][0], lookup.entry, source.dims[1][0])
    found = Lookup(source.term.read, source.dims[0][0], lookup.pages, wraps=True, flat=flat)
    return Form(dims, read_of(node, dims)), found


def _lookup(
    node: Hashable, dims: Sequence[Dim], source: Form, dim: int, index: Form, wraps: bool
) -> tuple[Form, Lookup]:
    if len(source.dims[dim]) != 1:
        raise Unaligned("a lookup along a dimension that is not one axis")
    if source.term.read.then or index.term.read.then:
        raise Unaligned("a lookup in what was multiplied or cast")
    lookup = Lookup(source.term.read, source.dims[dim][0], index.term.read, wraps)
    return Form(tuple(dims), read_of(node, dims)), lookup


def within(lookup: Lookup, form: Form, read: Read) -> Lookup:
    """What `read` says of a tensor that is `form` by itself, with what the tensor's elements are: over the read's axes.

    Raises: Unaligned, if the read divides the tensor's dimensions otherwise, or takes keys from the middle.
    """
    flat = lookup.flat
    whole = lookup.table.axes if flat is None else lookup.table.axes | {flat.keys}
    reads = [lookup.pages, lookup.table] + ([] if lookup.scales is None else [lookup.scales])
    (pages, table, *scales), changes = composed(reads, form, read, whole)
    if flat is not None:
        match changes.pop(flat.keys):
            case Axis() as keys:
                flat = replace(flat, keys=keys)
            case Slice(keys, start, 1) if same(start, 0):
                flat = replace(flat, keys=keys)
            case _:
                raise Unaligned("keys from the middle of pages")
    own = scales[0] if scales else None
    return replace(lookup, pages=pages, table=table, flat=flat, scales=own, then=(*lookup.then, *read.then))


def composed(
    reads: Sequence[Read], form: Form, read: Read, whole: frozenset[Axis] = frozenset()
) -> tuple[list[Read], dict[Axis, Change]]:
    """`reads`, of which the elements of a tensor that is `form` by itself are made, over the axes of a read of it; and
    what became of its own axes, of which those in `whole` may not be divided.

    Raises: Unaligned, if the read divides the tensor's dimensions otherwise.
    """
    reads, changes = list(reads), dict[Axis, Change]()
    for digits, axes in zip(read.dims, form.dims, strict=True):
        if len(digits) > 1 and len(axes) == 1 and axes[0] not in whole:
            parts = tuple(Axis(digit.extent) for digit in digits)
            reads = [piece_of(Term(part), axes[0], digits[0].before, parts).read for part in reads]
            digits, axes = (replace(digits[0], before=0, after=0), *digits[1:]), parts
        if len(digits) != len(axes):
            raise Unaligned("a dimension that was divided")
        for digit, axis in zip(digits, axes, strict=True):
            if not same(digit.extent, axis.size) or digit.axis is None:
                raise Unaligned("a dimension that was divided")
            changes[axis] = digit.axis if digit.whole else Slice(digit.axis, digit.start, digit.step)
    return [change_read(part, changes) for part in reads], changes


def scaled(lookup: Lookup, by: Lookup | Read) -> Lookup:
    """A lookup multiplied with another one, or with a tensor that every token shares, over common axes.

    Raises: Unaligned, if the other one is not in the same rows of the same entries of the same table.
    """
    if lookup.scales is not None:
        raise Unaligned("a lookup that is multiplied twice")
    if isinstance(by, Read):
        return replace(lookup, scales=by)
    changes = together(lookup, by)
    if by.scales is not None or changes is None:
        raise Unaligned("scales that are looked up elsewhere")
    return replace(lookup, scales=change_read(by.pages, changes))


def together(one: Lookup, other: Lookup) -> dict[Axis, Axis] | None:
    """The axes of `one` for those of `other`, both over common axes, if both are in the same entries of one table."""
    pairs = [(one.entry, other.entry)]
    if one.flat is not None and other.flat is not None:
        pairs += [(one.flat.page, other.flat.page), (one.flat.row, other.flat.row)]
    if (one.flat is None) != (other.flat is None) or not all(same(a.size, b.size) for a, b in pairs):
        return None
    changes = {b: a for a, b in pairs}
    alike = one.wraps == other.wraps and change_read(other.table, changes) == one.table
    return changes if alike else None


def flatten(lookup: Lookup, node: Hashable, dims: Sequence[Dim]) -> tuple[Form, Lookup] | None:
    """The leaf `node` with its flat lookup, if `dims` lay the pages of a lookup one behind the other, else None.

    `dims` are the axes of the node's dimensions, in which the lookup is.
    """
    merged = [dim for dim in dims if len(dim) == 2 and dim[0] in lookup.table.axes]
    if len(merged) != 1 or lookup.flat is not None:
        return None
    page, row = merged[0]
    if row not in lookup.pages.axes or row in lookup.table.axes:
        return None
    keys = Axis(product([page.size, row.size]))
    leaf_dims = tuple((keys,) if dim == merged[0] else dim for dim in dims)
    return Form(leaf_dims, read_of(node, leaf_dims)), replace(lookup, flat=Flat(keys, page, row))
