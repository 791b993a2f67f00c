"""Make keys one up-projection where the columns of all heads are joined, and then cut into heads.

Before   k = cat(latent @ W, rope repeated N times).view(T, N, P + R)
After    k = (cat(latent, rope) @ M).view(T, N, P + R),   M = [[W, 0], [0, identity repeated N times]]

A head's columns come from one latent then, on whichever side of the seam they lie: where the seam cuts a head, and
where it falls between two, of which one has up-projected columns alone and the other rope columns alone. The zeros add
nothing to finite numbers.

A key that repeats may itself be a product, as without a rope. It is then a latent as it is, or another up-projection of
what it is computed from: of the latent of other columns, which need not be joined with anything then, or of what is
narrower than the key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..algebra.operations import alike
from ..algebra.sizes import Size, Unaligned, known_at_most, product, same
from ..algebra.substitution import change_read
from ..algebra.terms import Axis, Dim, Join, Read, Segment, Sum
from ..code.reading import Reader, nodes_of, sources_of, write_as
from ..mla.products import same_tensor, up_projection
from ..mla.readable import is_held, unbroadcast
from ..mla.site import OwnLatent, Site
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

    @property
    def width(self) -> Size:
        return product(axis.size for axis in self.rank)

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
        first = _first_of_same_latent(self.pieces)
        own = {i: self.pieces[i] for i in first}
        latents = {i: read(piece.latent, *self.dims[:-1], piece.rank).to(dtype) for i, piece in own.items()}
        matrices = [piece.matrix(read, latents[i]) for i, piece in zip(first, self.pieces, strict=True)]
        before, behind, rows = 0, sum(matrix.shape[1] for matrix in matrices), dict[int, Tensor]()
        for i, matrix in zip(first, matrices, strict=True):
            behind -= matrix.shape[1]
            padded = F.pad(matrix.to(dtype), (before, behind))
            rows[i] = rows[i] + padded if i in rows else padded
            before += matrix.shape[1]
        shape = [read.realize(size) for size in shape_of(self.place)]
        columns = (_joined(latents, -1) @ _joined(rows, 0)).view(shape)
        if any(piece.biases for piece in self.pieces):
            biases = torch.cat([piece.bias(read, columns) for piece in self.pieces])
            columns = columns + biases.view(shape[len(self.dims) - 1 :])
        return columns

    def holds(self, added: Container[fx.Node], sites: Sequence[Site]) -> bool:
        """Whether a site up-projects the joined latents, by the matrix of this seam."""
        made = [read for site in sites for own in (site, site.of_keys) if own is not None for read in _made(own)]
        return any(node in added for read in made for node in nodes_of(read))


def _made(own: Site | OwnLatent) -> list[Read]:
    """What a seam gives a site."""
    return [own.latent.read, *([own.w_uk] if own.w_uk is not None else [])]


def _joined(tensors: dict[int, Tensor], dim: int) -> Tensor:
    """Tensors side by side; the tensor itself, if there is one."""
    each = list(tensors.values())
    return each[0] if len(each) == 1 else torch.cat(each, dim)


def _first_of_same_latent(pieces: Sequence[_Piece]) -> list[int]:
    """For each piece, the index of the first that has the same latent."""
    return [next(i for i, other in enumerate(pieces) if _share_latent(other, piece)) for piece in pieces]


def _share_latent(a: _Piece, b: _Piece) -> bool:
    if not alike(a.rank, b.rank):
        return False
    return same_tensor(a.latent, change_read(b.latent, dict(zip(b.rank, a.rank, strict=True))))


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
        up_projected = [_up_projected(segment, tokens) for segment in join.segments]
        repeated = [_repeated(segment) for segment in join.segments]
        known = _narrowest(up_projected, repeated)
        if known is None or not any(up_projected):
            continue
        reads = [read for piece in known for read in piece.reads]
        with contextlib.suppress(Unaligned):
            sources = sources_of(reads, node, (*form.dims, *trace[node].dims))
            yield Seam(node, form.dims, known, tuple(sources))


def _narrowest(up_projected: Sequence[_Piece | None], repeated: Sequence[_Piece | None]) -> tuple[_Piece, ...] | None:
    """The pieces, each as an up-projection or as a tensor that repeats, so that all latents together have few columns;
    None if one is neither."""
    either = list(zip(up_projected, repeated, strict=True))
    joined_anyway = [up for up, repeats in either if up is not None and repeats is None]
    pieces = list[_Piece]()
    for up, repeats in either:
        if up is None or repeats is None:
            piece = up or repeats
        else:
            joined = any(_share_latent(other, up) for other in joined_anyway)
            piece = up if joined or known_at_most(up.width, repeats.width) else repeats
        if piece is None:
            return None
        pieces.append(piece)
    return tuple(pieces)


def _up_projected(segment: Segment, tokens: set[Axis]) -> _Piece | None:
    """A segment of joined columns as an up-projection; None if it is none."""
    term, own = segment.term, {*segment.axes}
    terms = term.parts.terms if isinstance(term.parts, Sum) else (term,)
    products = [up for addend in terms if (up := up_projection(addend, tokens)) is not None]
    biases = tuple(addend.read for addend in terms if addend.axes.isdisjoint(tokens))
    if len(products) != 1 or len(biases) != len(terms) - 1:
        return None
    (up,) = products
    if not up.latent.axes.isdisjoint(own) or not up.weight.axes <= own | {*up.rank}:
        return None
    piece = _Piece(segment.axes, up.latent.read, up.rank, up.weight, (), up.scale, biases)
    return piece if all(map(is_held, piece.reads)) else None


def _repeated(segment: Segment) -> _Piece | None:
    """A segment of joined columns as a tensor that repeats; None if it is none."""
    read = unbroadcast(segment.term).read
    ranks = {axis: Axis(axis.size) for axis in segment.axes if axis in read.axes}
    if not 0 < len(ranks) < len(segment.axes) or not is_held(read):
        return None
    return _Piece(segment.axes, change_read(read, ranks), tuple(ranks.values()), None, tuple(ranks))
