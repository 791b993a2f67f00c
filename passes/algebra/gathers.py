"""Reads through a table: `pages[block_table]` in its spellings, and the same with pages and rows flattened.

    node[b, n, r, w] = pages[table[b, n], r, w]                              a lookup
    node[b, t, w]    = pages[table[b, t // page_size], t % page_size, w]     its flat form

The form of such a node is a leaf. Its term records the lookup: `stored` is a `Lookup`.

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
    """The form of `node`: `source` with its dimension `dim` replaced by the dimensions of `index`.

    Raises: Unaligned, if that dimension is not one axis, or if either tensor was already multiplied or cast.
    """
    source, index = fresh(source), fresh(index)
    dims = (*source.dims[:dim], *index.dims, *source.dims[dim + 1 :])
    return _lookup(node, dims, source, dim, index, wraps)


def gather(node: Hashable, source: Form, dim: int, index: Form) -> Form:
    """The form of `node`: elements of `source` at their own indices, except in `dim`, where `index` gives the index.

    Raises: Unaligned, if that dimension is not one axis, if another dimension is taken only in part, or if either
    tensor was already multiplied or cast.
    """
    labels = [[i if i != dim else "entry" for i in range(len(source.dims))], range(len(index.dims))]
    if any(not same(a, b) for i, (a, b) in enumerate(zip(source.shape, index.shape, strict=True)) if i != dim):
        raise Unaligned("a lookup in a part of a tensor")
    shape = index.shape
    (source, index), axes = align([source, index], labels)
    dims = tuple(axes[i] for i in range(len(shape)))
    return _lookup(node, expand(Form(dims, index.term), shape).dims, source, dim, index, wraps=False)


def by_position(node: Hashable, source: Form, page: Form, lookup: Lookup) -> Form:
    """The form of `node`: the token at each position in `source`, whose first two dimensions are pages and rows.

    `page` gives the page of each position: the entry of the table `lookup.pages` at the position divided by the
    number of rows of a page.

    Raises: Unaligned, if pages, rows or positions are not one axis each, or if `source` was already multiplied or cast.
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
    """The lookup that a term is, including what was done to its element since; None if the term is not a lookup."""
    stored = term.stored
    return replace(stored, then=(*stored.then, *term.read.then)) if isinstance(stored, Lookup) else None


def scaled(lookup: Lookup, by: Lookup | Read) -> Lookup:
    """A lookup multiplied by another lookup, or by a tensor that all tokens share; both are over common axes.

    Raises: Unaligned, if either has scales already, or if the other lookup reads other rows or through other entries.
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
    """The bound axes of `one` for those of `other`, if both read the same entries of one table; else None.

    The two lookups are over common axes.
    """
    pairs = [(one.entry, other.entry)]
    if one.flat is not None and other.flat is not None:
        pairs += [(one.flat.page, other.flat.page), (one.flat.row, other.flat.row)]
    if (one.flat is None) != (other.flat is None) or not all(same(a.size, b.size) for a, b in pairs):
        return None
    changes = {b: a for a, b in pairs}
    alike = one.wraps == other.wraps and change_read(other.table, changes) == one.table
    return changes if alike else None


def flatten(node: Hashable, form: Form) -> Form | None:
    """`node` as the leaf of a flat lookup, if `form` flattens the pages and rows of a lookup into one axis; else
    None."""
    if not isinstance(form.term.stored, Lookup) or form.term.stored.flat is not None:
        return None
    form = fresh(form)  # the leaf binds the axes of pages and rows: they must not be another form's
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
