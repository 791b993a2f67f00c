"""What of a proof code can read: tensors that the graph holds, and what is made of such."""

from __future__ import annotations

from ..algebra.terms import Read, Unread, made_of


def is_held(read: Read) -> bool:
    """Whether all that is read is in tensors of the graph."""
    return not isinstance(read.source, Unread) and all(map(is_held, made_of(read.source)))
