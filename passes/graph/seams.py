"""Make keys one up-projection where the columns of all heads are joined, and then cut into heads.

Before   k = cat(latent @ W, rope repeated N times).view(T, N, P + R)
After    k = (cat(latent, rope) @ M).view(T, N, P + R),   M = [[W, 0], [0, identity repeated N times]]

A head's columns come from one latent then, on whichever side of the seam they lie: where the seam cuts a head, and
where it falls between two, of which one has up-projected columns alone and the other rope columns alone. The zeros add
nothing to finite numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..algebra.sizes import Unaligned, product, same
from ..algebra.substitution import change_read
from ..algebra.terms import Axis, Dim, Join, Read, Segment, Sum
from ..code.reading import Reader, nodes_of, sources_of, write_as
from ..mla.products import up_projection
from ..mla.readable import is_held
from ..mla.site import Site
from ..nodes.arguments import RESHAPES, argument, arguments, aten, is_tensor
from ..nodes.shapes import shape_of
from ..trace.trace import Trace

_STEPS = 4
"""How far back from a view its join may lie: copies and views in between."""


@dataclass(frozen=True)
class _Piece:
    """Columns `along`: `scale * sum over rank of latent * weight + biases`. Without a weight, they are the latent
    itself, over `same`, and repeated along all other axes."""

    along: Dim
    latent: Read
    rank: Dim
    weight: Read | None = None
    same: Dim = ()
    scale: float = 1.0
    biases: tuple[Read, ...] = ()

    @property
    def reads(self) -> tuple[Read, ...]:
        return self.latent, *((self.weight,) if self.weight is not None else ()), *self.biases

    def matrix(self, read: Reader, latent: Tensor) -> Tensor:
        """`[rank, columns]`: what a `latent [..., rank]` is multiplied by."""
        if self.weight is not None:
            return read(self.weight, self.rank, self.along) * self.scale
        identity = torch.eye(latent.shape[-1], dtype=latent.dtype, device=latent.device)
        return write_as(identity, (self.rank, self.same), (self.rank, self.along), read.realize)

    def bias(self, read: Reader, like: Tensor) -> Tensor:
        """`[columns]`: what is added to the product; no tensor that is known to be zeros, which as a piece of a sum
        would take the product apart at the seam."""
        nothing = like.new_zeros([read.realize(product(axis.size for axis in self.along))]) + 0.0
        return sum((read(bias, self.along) for bias in self.biases), nothing)


@dataclass(frozen=True)
class Seam:
    """The view `place`, by which joined `pieces` are cut into heads; over `dims` before that."""

    place: fx.Node
    dims: tuple[Dim, ...]
    pieces: tuple[_Piece, ...]
    sources: tuple[fx.Node, ...]

    def __call__(self, *values: Tensor | int) -> Tensor:
        """The product of the joined latents with one matrix, as heads."""
        read, dtype = Reader(self.sources, values), self.place.meta["val"].dtype
        latents = [read(piece.latent, *self.dims[:-1], piece.rank).to(dtype) for piece in self.pieces]
        matrices = [piece.matrix(read, latent) for piece, latent in zip(self.pieces, latents, strict=True)]
        before, behind, rows = 0, sum(matrix.shape[1] for matrix in matrices), []
        for matrix in matrices:
            behind -= matrix.shape[1]
            rows.append(F.pad(matrix.to(dtype), (before, behind)))
            before += matrix.shape[1]
        shape = [read.realize(size) for size in shape_of(self.place)]
        columns = (torch.cat(latents, -1) @ torch.cat(rows)).view(shape)
        if any(piece.biases for piece in self.pieces):
            biases = torch.cat([piece.bias(read, columns) for piece in self.pieces])
            columns = columns + biases.view(shape[len(self.dims) - 1 :])
        return columns

    def holds(self, added: Container[fx.Node], sites: Sequence[Site]) -> bool:
        """Whether the latent of a site is the joined one."""
        latents = [own.latent for site in sites for own in (site, site.of_keys) if own is not None]
        return any(node in added for latent in latents for node in nodes_of(latent.read))


def may_be_seam(node: fx.Node) -> bool:
    """Whether a node may be a view that cuts joined columns into heads; the join lies at most a few steps back."""
    if node.target not in RESHAPES or not is_tensor(node):
        return False
    width, source = node.meta["val"].shape[-1:], arguments(node)[0]
    for _ in range(_STEPS):
        if source.target is aten.cat.default and argument(source, "dim") in (-1, source.meta["val"].dim() - 1):
            widths = [piece.meta["val"].shape[-1] for piece in arguments(source)[0] if piece.meta["val"].dim()]
            return all(isinstance(w, int) for w in (*width, *widths)) and max(*width, 0) < sum(widths)
        if not source.all_input_nodes:
            break
        source = source.all_input_nodes[0]
    return False


def seams_in(graph: fx.Graph, trace: Trace) -> Iterator[Seam]:
    """The views of a graph that cut joined columns into heads which do not show by themselves what each head's are, if
    one side of the seam at least is an up-projection."""
    for node in graph.nodes:
        if not may_be_seam(node) or trace[node].term.parts is not None:
            continue
        form = trace[arguments(node)[0]]
        join = form.term.parts
        if not isinstance(join, Join) or form.dims[-1] != (join.axis,):
            continue
        if not all(same(*sizes) for sizes in zip(form.shape[:-1], shape_of(node), strict=False)):
            continue
        tokens = {axis for dim in form.dims[:-1] for axis in dim}
        pieces = [_piece(segment, tokens) for segment in join.segments]
        known = tuple(piece for piece in pieces if piece is not None)
        if len(known) < len(pieces) or all(piece.weight is None for piece in known):
            continue
        reads = [read for piece in known for read in piece.reads]
        with contextlib.suppress(Unaligned):
            sources = sources_of(reads, node, (*form.dims, *trace[node].dims))
            yield Seam(node, form.dims, known, tuple(sources))


def _piece(segment: Segment, tokens: set[Axis]) -> _Piece | None:
    """A segment of joined columns; None if it is neither an up-projection nor a tensor that repeats."""
    term, own = segment.term, {*segment.axes}
    terms = term.parts.terms if isinstance(term.parts, Sum) else (term,)
    products = [up for addend in terms if (up := up_projection(addend, tokens)) is not None]
    biases = tuple(addend.read for addend in terms if addend.axes.isdisjoint(tokens))
    if len(products) == 1 and len(biases) == len(terms) - 1:
        (up,) = products
        if up.latent.axes.isdisjoint(own) and up.weight.axes <= own | {*up.rank}:
            piece = _Piece(segment.axes, up.latent.read, up.rank, up.weight, (), up.scale, biases)
            return piece if all(map(is_held, piece.reads)) else None
    ranks = {axis: Axis(axis.size) for axis in segment.axes if axis in term.read.axes}
    read = change_read(term.read, ranks)
    repeats = 0 < len(ranks) < len(segment.axes)
    return _Piece(segment.axes, read, tuple(ranks.values()), None, tuple(ranks)) if repeats and is_held(read) else None
