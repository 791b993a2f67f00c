"""Reads through a table: `pages[block_table]` in its spellings, and the same with pages laid one behind the other.

    node[b, n, r, w] = pages[table[b, n], r, w]                              a lookup
    node[b, t, w]    = pages[table[b, t // page_size], t % page_size, w]     its flat form

The form of such a node is a leaf whose term says so: it is `stored` as a `Lookup`.

Pure Python, like `operations`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from .operations import align, expand, fresh, read_of
from .sizes import Unaligned, product, same
from .substitution import change_read
from .terms import Axis, Dim, Flat, Form, Lookup, Read, Term


def look_up(node: Hashable, source: Form, dim: int, index: Form, wraps: bool) -> Form:
    """The tensor `node`: `source` with its dimension `dim` replaced by those of `index`.

    Raises: Unaligned, if that dimension is not one axis.
    """
    source, index = fresh(source), fresh(index)
    dims = (*source.dims[:dim], *index.dims, *source.dims[dim + 1 :])
    return _lookup(node, dims, source, dim, index, wraps)


def gather(node: Hashable, source: Form, dim: int, index: Form) -> Form:
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


def by_position(node: Hashable, source: Form, page: Form, lookup: Lookup) -> Form:
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
    return _leaf(node, dims, found)


def _lookup(node: Hashable, dims: Sequence[Dim], source: Form, dim: int, index: Form, wraps: bool) -> Form:
    if len(source.dims[dim]) != 1:
        raise Unaligned("a lookup along a dimension that is not one axis")
    if source.term.read.then or index.term.read.then:
        raise Unaligned("a lookup in what was multiplied or cast")
    return _leaf(node, dims, Lookup(source.term.read, source.dims[dim][0], index.term.read, wraps))


def _leaf(node: Hashable, dims: Sequence[Dim], lookup: Lookup) -> Form:
    return Form(tuple(dims), replace(read_of(node, dims), stored=lookup))


def lookup_of(term: Term) -> Lookup | None:
    """What is looked up, with all that was done to it after; None if a term is no such element."""
    stored = term.stored
    return replace(stored, then=(*stored.then, *term.read.then)) if isinstance(stored, Lookup) else None


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


def flatten(node: Hashable, form: Form) -> Form | None:
    """The leaf `node` of a flat lookup, if its form lays the pages of a lookup one behind the other, else None."""
    if not isinstance(form.term.stored, Lookup) or form.term.stored.flat is not None:
        return None
    form = fresh(form)  # its pages and rows are bound in the leaf
    lookup = lookup_of(form.term)
    assert lookup is not None
    merged = [dim for dim in form.dims if len(dim) == 2 and dim[0] in lookup.table.axes]
    if len(merged) != 1:
        return None
    page, row = merged[0]
    if row not in lookup.pages.axes or row in lookup.table.axes:
        return None
    keys = Axis(product([page.size, row.size]))
    dims = tuple((keys,) if dim == merged[0] else dim for dim in form.dims)
    return _leaf(node, dims, replace(lookup, flat=Flat(keys, page, row)))
