"""Queries that the graph holds only as the factors of a product."""

from __future__ import annotations

from dataclasses import replace

from ..algebra.made import contracted
from ..algebra.terms import Product, Term, Unread
from .site import Piece


def computed(piece: Piece) -> Piece:
    """A piece with a query to read: one to compute, where the graph holds only factors of the product that it is."""
    query = piece.query
    if not isinstance(query.read.source, Unread) or not isinstance(query.parts, Product):
        return piece
    left, right, summed, scale = query.parts.left, query.parts.right, query.parts.summed, query.parts.scale
    read = contracted(left.read, right.read, summed)
    return replace(piece, query=Term(replace(read, then=query.read.then), query.parts), scale=piece.scale * scale)
