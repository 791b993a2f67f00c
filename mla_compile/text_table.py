"""Format tables as aligned text and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Format rows, all of the same number of cells, as lines with columns two spaces apart.

    `sides` has `<` for each left-aligned column and `>` for each right-aligned one; its last character holds for all
    further columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{side}{width}" for side, width in zip(sides.ljust(len(widths), sides[-1]), widths, strict=True)]
    return ["  ".join(map(format, row, formats)).rstrip() for row in rows]


def with_header(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, with the keys of the first row as the header."""
    text = StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
