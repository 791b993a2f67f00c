"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Rows of as many cells as lines, columns two spaces apart.

    `sides` has `<` for each column whose cells begin at its left, `>` for each whose end at its right; the last is that
    of all further ones.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{side}{width}" for side, width in zip(sides.ljust(len(widths), sides[-1]), widths, strict=True)]
    return ["  ".join(map(format, row, formats)).rstrip() for row in rows]
