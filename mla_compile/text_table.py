"""Tables as text, for people and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Rows of as many cells as lines, columns two spaces apart.

    `sides` has `<` for each column whose cells begin at its left, `>` for each whose end at its right; the last is that
    of all further ones.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{side}{width}" for side, width in zip(sides.ljust(len(widths), sides[-1]), widths, strict=True)]
    return ["  ".join(map(format, row, formats)).rstrip() for row in rows]


def with_header(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, under the names that the first one has."""
    text = StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
