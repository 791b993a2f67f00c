"""Choose what goes through a workspace at a time: a tile of heads x tokens, heads first.

Heads are cut before tokens, because a head that sees all its keys at once needs no running sums between chunks. Those
take 4 (V + 2) bytes per query and head, read and written once per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

PROGRAMS = 4
"""Programs per multiprocessor, at least, if a problem has as many: under a causal limit the longest takes twice the
mean time."""


@dataclass(frozen=True)
class Share:
    """How many sequences, heads of each sequence, and tokens of each head are taken at a time."""

    sequences: int
    heads: int
    tokens: int


def share_of(batch: int, heads: int, tokens: int, workspace_tokens: int, fewest_heads: int = 1) -> Share:
    """The share of `[B, N, T]` keys that fits a workspace of `workspace_tokens` keys of all heads.

    All arguments are at least 1. As many whole sequences as fit are taken together. Of a longer sequence, all tokens of
    as many heads as fit are taken; its tokens are cut only where `fewest_heads`, the number that keeps the device busy,
    would not fit.
    """
    if tokens <= workspace_tokens:
        return Share(min(workspace_tokens // tokens, batch), heads, tokens)
    pairs = workspace_tokens * heads
    size = min(tokens, pairs // min(fewest_heads, heads))
    return Share(1, in_even_groups(heads, pairs // size), size)


def in_even_groups(heads: int, most: int) -> int:
    """The number of heads in a group, at most `most`, such that all groups have about the same size."""
    groups = -(-heads // min(most, heads))
    return -(-heads // groups)
