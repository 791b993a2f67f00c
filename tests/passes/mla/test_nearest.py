"""Rope queries are read from before the join that made the queries, where one of its tensors has all of them."""

import pytest
import torch
from torch import fx

from mla_compile.passes.algebra.terms import Axis, Digit, Read
from mla_compile.passes.mla.nearest import nearest

aten = torch.ops.aten
B, N, P, R = Axis(2), Axis(3), 8, 4


def joined(*widths, dtypes=None, dim=-1):
    """A `cat` node of tensors `[2, 3, width]`, or `[width, 3, 2]` along another `dim`, and these tensors."""
    graph = fx.Graph()
    pieces = []
    for i, width in enumerate(widths):
        shape = (2, 3, width) if dim == -1 else (width, 3, 2)
        piece = graph.placeholder(f"x{i}")
        piece.meta["val"] = torch.empty(shape, dtype=dtypes[i] if dtypes else torch.float32, device="meta")
        pieces.append(piece)
    node = graph.call_function(aten.cat.default, (pieces, dim))
    node.meta["val"] = torch.cat([piece.meta["val"] for piece in pieces], dim)
    return node, pieces


def columns(source, start, size, **more):
    return Read(
        source, ((Digit(B, 2),), (Digit(N, 3),), (Digit(Axis(size), source.meta["val"].shape[2], start, **more),))
    )


@pytest.mark.parametrize(("start", "size", "which", "own"), [(8, 4, 1, 0), (9, 2, 1, 1), (0, 8, 0, 0), (12, 5, 2, 0)])
def test_columns_of_one_piece(start, size, which, own):
    node, pieces = joined(P, R, 5)
    read = columns(node, start, size)
    found = nearest(read)
    assert found.source is pieces[which]
    assert found.dims[:2] == read.dims[:2]
    (digit,) = found.dims[2]
    assert (digit.axis, digit.extent, digit.start) == (read.dims[2][0].axis, (P, R, 5)[which], own)


def test_a_join_of_a_join():
    inner, pieces = joined(P, R)
    graph = inner.graph
    node = graph.call_function(aten.cat.default, ([pieces[0], inner], -1))
    node.meta["val"] = torch.cat([pieces[0].meta["val"], inner.meta["val"]], -1)
    assert nearest(columns(node, 2 * P, R)).source is pieces[1]


STAY = {
    "of two pieces": (lambda: joined(P, R), (7, 3), {}),
    "every other column": (lambda: joined(P, R), (8, 2), {"step": 2}),
    "other dtypes": (lambda: joined(P, R, dtypes=(torch.float32, torch.bfloat16)), (8, 4), {}),
}


@pytest.mark.parametrize(("make", "place", "more"), STAY.values(), ids=STAY)
def test_what_stays_as_it_is(make, place, more):
    read = columns(make()[0], *place, **more)
    assert nearest(read) is read
