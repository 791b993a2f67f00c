"""Make keys one up-projection where the columns of all heads are joined, and then cut into heads.

Before   k = cat(latent @ W, rope repeated N times).view(T, N, P + R)
After    k = (cat(latent, rope) @ M).view(T, N, P + R),   M = [[W, 0], [0, identity repeated N times]]

A head's columns come from one latent then, on whichever side of the seam they lie: where the seam cuts a head, and
where it falls between two, of which one has up-projected columns alone and the other rope columns alone. The zeros add
nothing to finite numbers.

A key that repeats may itself be a product, as without a rope. It is then a latent as it is, or another up-projection of
what it is computed from: of the latent of other columns, which need not be joined with anything then, or of what is
narrower than the key. Columns that are cached as they are, beside those that are up-projected, repeat nowhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..algebra.operations import alike
from ..algebra.sizes import Unaligned, known_at_most, same
from ..algebra.substitution import change_read
from ..algebra.terms import Dim, Join, Read
from ..code.reading import Reader, nodes_of, sources_of
from ..mla.products import same_tensor
from ..mla.site import OwnLatent, Site
from ..nodes.arguments import RESHAPES, argument, arguments, aten, is_tensor
from ..nodes.shapes import shape_of
from ..trace.trace import Trace
from .columns import Piece, as_it_is, up_projected

_STEPS = 4
"""How far back from a view its join may lie: copies and views in between."""


@dataclass(frozen=True)
class Seam:
    """The view `place`, by which joined `pieces` are cut into heads; over `dims` before that."""

    place: fx.Node
    dims: tuple[Dim, ...]
    pieces: tuple[Piece, ...]
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


def _first_of_same_latent(pieces: Sequence[Piece]) -> list[int]:
    """For each piece, the index of the first that has the same latent."""
    return [next(i for i, other in enumerate(pieces) if _share_latent(other, piece)) for piece in pieces]


def _share_latent(a: Piece, b: Piece) -> bool:
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
        projected = [up_projected(segment, tokens) for segment in join.segments]
        known = _narrowest(projected, [as_it_is(segment) for segment in join.segments])
        if known is None or not any(projected):
            continue
        reads = [read for piece in known for read in piece.reads]
        with contextlib.suppress(Unaligned):
            sources = sources_of(reads, node, (*form.dims, *trace[node].dims))
            yield Seam(node, form.dims, known, tuple(sources))


def _narrowest(projected: Sequence[Piece | None], held: Sequence[Piece | None]) -> tuple[Piece, ...] | None:
    """The pieces, each as an up-projection or, above all if it repeats, as it is, so that all latents together have few
    columns; None if one is neither, or has more columns than any of the others' latents."""
    widths = [up.width for up in projected if up is not None]
    few = [
        each if each and (each.repeats or any(known_at_most(each.width, w) for w in widths)) else None for each in held
    ]
    either = list(zip(projected, few, strict=True))
    joined_anyway = [up for up, itself in either if up is not None and itself is None]
    pieces = list[Piece]()
    for up, itself in either:
        if up is None or itself is None:
            piece = up or itself
        else:
            joined = any(_share_latent(other, up) for other in joined_anyway) or not itself.repeats
            piece = up if joined or known_at_most(up.width, itself.width) else itself
        if piece is None:
            return None
        pieces.append(piece)
    return tuple(pieces)
