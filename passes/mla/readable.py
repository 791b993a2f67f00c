"""What code can read of a proof: tensors that the graph holds, and whatever is made of these."""

from __future__ import annotations

from ..algebra.terms import Read, Unread, made_of


def is_held(read: Read) -> bool:
    """Whether all that is read is held in tensors of the graph."""
    return not isinstance(read.source, Unread) and all(map(is_held, made_of(read.source)))
