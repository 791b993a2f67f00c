"""Look tokens up in latents, not in the keys and values that are up-projected from them.

Before   k = (latent @ W).view(B, T, N, P)[sequence, token]          token: `[B, Sq, topk]`, those that a query names
After    k = (latent[sequence, token] @ W).view(B, Sq, topk, N, P)

Columns that are joined are looked up piece by piece, a rope key as it is. Whatever an index names, and however often,
each looked up row is the up-projection of the latent that is looked up by the same index.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ..algebra.sizes import Unaligned, product, same
from ..algebra.terms import Axis, Dim, Form, Join, Read, Segment
from ..code.reading import Reader, nodes_of, sources_of
from ..mla.products import summands, up_projection
from ..mla.readable import is_held, unbroadcast
from ..mla.site import Site
from ..nodes.arguments import INTEGERS, arguments, aten, is_tensor
from ..trace.trace import Trace
from .columns import Piece, up_projected

_STEPS = 16
"""How far back from a lookup the product may lie: views, joins and slices in between."""
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
_LOOKUPS = (aten.index.Tensor, aten.index_select.default, aten.gather.default)


@dataclass(frozen=True)
class LookedUp:
    """A lookup in what is up-projected: the node `place`, by `indices` of adjacent dimensions from `first` on."""

    place: fx.Node
    first: int
    indices: tuple[fx.Node, ...] | Form
    """The index of a `gather` is a form, as it repeats along the columns."""
    dims: tuple[Dim, ...]
    """Of the tensor in which tokens are looked up."""
    columns: tuple[int, ...]
    """Those of `dims` along which a token's columns lie; the others are tokens, of which some are looked up."""
    pieces: tuple[tuple[Dim, Piece | Read], ...]
    """The columns, piece by piece: their axes in place of those of the last of `columns`, and what they are."""
    sources: tuple[fx.Node, ...]

    def __call__(self, *values: Tensor | int) -> Tensor:
        """The up-projection of the latents that are looked up, with the dimensions of `place`."""
        read, given = Reader(self.sources, values), dict(zip(self.sources, values, strict=True))
        kept = [i for i in range(len(self.dims)) if i not in self.columns]
        tokens, before = [self.dims[i] for i in kept], sum(i < self.first for i in kept)
        if isinstance(self.indices, Form):
            indices = [read(unbroadcast(self.indices.term).read, *(self.indices.dims[i] for i in kept))]
        else:
            indices = [index for node in self.indices if isinstance(index := given[node], Tensor)]
        found = [self._columns(read, tokens, before, indices, own, piece) for own, piece in self.pieces]
        joined = found[0] if len(found) == 1 else torch.cat(found, -1)
        return joined.permute(self._order(joined.dim())).to(self.place.meta["val"].dtype)

    def _columns(
        self, read: Reader, tokens: Sequence[Dim], before: int, indices: Sequence[Tensor], own: Dim, piece: Piece | Read
    ) -> Tensor:
        """`[*tokens with those looked up, *columns]` of one piece."""
        dims = [self.dims[i] for i in self.columns[:-1]] + [own]
        merged = [read.realize(product(axis.size for axis in dim)) for dim in dims]
        if isinstance(piece, Read):
            there = [axis for dim in dims for axis in dim if axis in piece.axes]
            found = self._look_up(read(piece, *tokens, *((axis,) for axis in there)), before, indices)
            kept = found.shape[: found.dim() - len(there)]
            missing = [axis not in piece.axes for dim in dims for axis in dim]
            own_sizes = iter(found.shape[len(kept) :])
            shape = [1 if is_missing else next(own_sizes) for is_missing in missing]
            sizes = [read.realize(axis.size) for dim in dims for axis in dim]
            wide = found.reshape(*kept, *shape).expand(*kept, *sizes)
            return wide.reshape(*kept, *merged)
        latent = read(piece.latent, *tokens, piece.rank)
        found = self._look_up(latent, before, indices)
        columns = found @ piece.matrix(read, latent).to(found.dtype)
        if piece.biases:
            columns = columns + piece.bias(read, columns)
        return columns.unflatten(-1, merged)

    def _look_up(self, latent: Tensor, before: int, indices: Sequence[Tensor]) -> Tensor:
        if self.place.target is aten.index_select.default:
            return latent.index_select(before, indices[0])
        if self.place.target is aten.index.Tensor:
            return latent[(slice(None),) * before + tuple(indices)]
        (index,) = indices
        own = latent.shape[index.dim() :]
        return latent.gather(before, index.reshape(*index.shape, *(1 for _ in own)).expand(*index.shape, *own))

    def _order(self, dims: int) -> list[int]:
        """Where each dimension of `place` is among tokens, then columns."""
        tokens = iter(range(dims - len(self.columns)))
        columns = iter(range(dims - len(self.columns), dims))
        looked_up = 1 if isinstance(self.indices, Form) else len(self.indices)
        named = dims - len(self.dims) + looked_up
        order = list[int]()
        for i in range(len(self.dims)):
            if i in self.columns:
                order.append(next(columns))
            elif i == self.first:
                order += [next(tokens) for _ in range(named)]
            elif not self.first < i < self.first + looked_up:
                order.append(next(tokens))
        return order

    def holds(self, added: Container[fx.Node], sites: Sequence[Site]) -> bool:
        """Whether the latents that are looked up are those of a site."""
        latents = [own.latent for site in sites for own in (site, site.of_keys) if own is not None]
        return any(node in added for latent in latents for node in nodes_of(latent.read))


def may_be_lookup(node: fx.Node) -> bool:
    """Whether a node looks up rows of what may be a product; the product lies at most a few steps back."""
    if node.target not in _LOOKUPS or not is_tensor(node) or not _indices(node):
        return False
    behind = {arguments(node)[0]}
    for _ in range(_STEPS):
        if any(before.target in _PRODUCTS for before in behind):
            return True
        behind = {further for before in behind for further in before.all_input_nodes}
    return False


def _indices(node: fx.Node) -> dict[int, fx.Node]:
    """The indices of a lookup, by their dimensions; none if these are not adjacent, or an index is no integer."""
    source, *given = arguments(node)
    if node.target is not aten.index.Tensor:
        dim, index = given[:2]
        return {dim % source.meta["val"].dim(): index}
    found = {dim: index for dim, index in enumerate(given[0]) if index is not None}
    adjacent = bool(found) and max(found) - min(found) == len(found) - 1
    integers = all(index.meta["val"].dtype in INTEGERS for index in found.values())
    return found if adjacent and integers else {}


def looked_up_in(graph: fx.Graph, trace: Trace) -> Iterator[LookedUp]:
    """The lookups of a graph by which tokens of what is up-projected are chosen."""
    for node in graph.nodes:
        if not may_be_lookup(node):
            continue
        found, form = _indices(node), trace[arguments(node)[0]]
        first, chosen = min(found), {axis for dim in found for axis in form.dims[dim]}
        gathers = node.target is aten.gather.default
        varied = _varied(node, form, trace) if gathers else frozenset(found)
        columns = _columns(form, chosen, varied) if varied is not None else ()
        pieces = _pieces(form, columns) if columns else None
        if pieces is None or varied is None or not varied.isdisjoint(columns):
            continue
        reads = [read for _, piece in pieces for read in (piece.reads if isinstance(piece, Piece) else (piece,))]
        with contextlib.suppress(Unaligned):
            indices = trace[found.popitem()[1]] if gathers else tuple(found.values())
            own = [unbroadcast(indices.term).read] if isinstance(indices, Form) else []
            sources = sources_of([*reads, *own], node, (*form.dims, *trace[node].dims))
            nodes = () if isinstance(indices, Form) else indices
            everything = tuple(dict.fromkeys([*nodes, *sources]))
            yield LookedUp(node, first, indices, tuple(form.dims), columns, pieces, everything)


def _segments(form: Form) -> tuple[Segment, ...]:
    """The pieces of which a tensor is joined; the tensor itself, without axes, if it is not."""
    return form.term.parts.segments if isinstance(form.term.parts, Join) else (Segment((), form.term),)


def _varied(node: fx.Node, form: Form, trace: Trace) -> frozenset[int] | None:
    """The dimensions along which the index of a `gather` varies, and the one that it chooses from; None if it leaves
    out elements of another one."""
    _, dim, index = arguments(node)[:3]
    dim, given = dim % len(form.dims), trace[index]
    if not is_held(given.term.read):
        return None
    if any(not same(a, b) for i, (a, b) in enumerate(zip(form.shape, given.shape, strict=True)) if i != dim):
        return None
    return frozenset({dim, *(i for i, own in enumerate(given.dims) if not given.term.axes.isdisjoint(own))})


def _columns(form: Form, chosen: set[Axis], varied: frozenset[int]) -> tuple[int, ...]:
    """The dimensions of a tensor over which neither its up-projection's latent runs nor, as those `varied`, what is
    looked up; none if there is no such up-projection, or if a dimension is of both kinds."""
    for term in summands(form.term, chosen):
        up = up_projection(term, chosen)
        if up is None:
            continue
        tokens = {i for i, dim in enumerate(form.dims) if up.latent.axes.issuperset(dim)} | varied
        columns = [i for i in range(len(form.dims)) if i not in tokens]
        alone = all(up.latent.axes.isdisjoint(form.dims[i]) for i in columns)
        return tuple(columns) if alone else ()
    return ()


def _pieces(form: Form, columns: tuple[int, ...]) -> tuple[tuple[Dim, Piece | Read], ...] | None:
    """What the columns of a tensor are, piece by piece; None if one is neither an up-projection nor held."""
    join, last = form.term.parts, form.dims[columns[-1]]
    if isinstance(join, Join) and last != (join.axis,):
        return None
    tokens = {axis for i, dim in enumerate(form.dims) if i not in columns for axis in dim}
    others = [axis for i in columns[:-1] for axis in form.dims[i]]
    found = list[tuple[Dim, Piece | Read]]()
    for segment in _segments(form):
        own = segment.axes or last
        piece: Piece | Read | None = up_projected(Segment((*others, *own), segment.term), tokens)
        if piece is None:
            piece = unbroadcast(segment.term).read
            if not is_held(piece) or not piece.axes <= tokens.union(others, own):
                return None
        found.append((own, piece))
    return tuple(found)
