"""What goes through a workspace at a time: a tile of heads x tokens, heads first.

A head that sees all its keys at once keeps no running sums between chunks, which are 4 (V + 2) bytes of each query and
head, read and written once a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Some sequences, heads of each, and tokens of each of those."""

    sequences: int
    heads: int
    tokens: int


def share_of(batch: int, heads: int, tokens: int, workspace_tokens: int, fewest_heads: int = 1) -> Share:
    """A share of `[B, N, T]` keys for a workspace of `workspace_tokens` keys of all heads, all numbers at least 1.

    Sequences that fit come whole, and together. Of a longer one all tokens of as many heads as fit; tokens are cut
    where `fewest_heads`, which keep the device busy, do not fit otherwise.
    """
    if tokens <= workspace_tokens:
        return Share(min(workspace_tokens // tokens, batch), heads, tokens)
    pairs = workspace_tokens * heads
    size = min(tokens, pairs // min(fewest_heads, heads))
    return Share(1, in_even_groups(heads, pairs // size), size)


def in_even_groups(heads: int, most: int) -> int:
    """Heads of a group, at most so many, where all groups are of about the same size."""
    groups = -(-heads // min(most, heads))
    return -(-heads // groups)
