"""Queries that the graph holds as the factors of a product alone."""

from __future__ import annotations

from dataclasses import replace

from ..algebra.made import contracted
from ..algebra.terms import Product, Term, Unread
from .site import Piece


def computed(piece: Piece) -> Piece:
    """A piece whose query is read, or computed where it is a product that is held in parts alone."""
    query = piece.query
    if not isinstance(query.read.source, Unread) or not isinstance(query.parts, Product):
        return piece
    left, right, summed, scale = query.parts.left, query.parts.right, query.parts.summed, query.parts.scale
    read = contracted(left.read, right.read, summed)
    return replace(piece, query=Term(replace(read, then=query.read.then), query.parts), scale=piece.scale * scale)
