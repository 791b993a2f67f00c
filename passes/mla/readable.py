"""What code can read of a proof: tensors that the graph holds, and whatever is made of these."""

from __future__ import annotations

from dataclasses import replace

from ..algebra.terms import Read, Term, Unread, made_of


def is_held(read: Read) -> bool:
    """Whether all that is read is held in tensors of the graph."""
    return not isinstance(read.source, Unread) and all(map(is_held, made_of(read.source)))


def unbroadcast(term: Term) -> Term:
    """The same element, read at index 0 of the axes along which its tensor repeats it."""
    repeated = term.read.axes - term.axes
    if not repeated:
        return term
    dims = tuple(
        tuple(replace(digit, axis=None) if digit.axis in repeated else digit for digit in dim) for dim in term.read.dims
    )
    return replace(term, read=replace(term.read, dims=dims))
