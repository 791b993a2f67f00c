"""Rename the symbols of sizes in the order in which they appear, so that the sizes of a model's layers read the same.

To torch, a cache of 27 layers has 27 lengths, which happen to be equal.
"""

from __future__ import annotations

import sympy

from .sizes import Size


class Renaming:
    """Gives each of torch's symbols one of our own: `n0`, `n1`, ..., positive integers."""

    def __init__(self) -> None:
        self.renamed: dict[sympy.Symbol, sympy.Symbol] = {}

    def __call__(self, size: Size) -> Size:
        """The size in our symbols."""
        if isinstance(size, int):
            return size
        for symbol in sorted(size.free_symbols, key=str):
            self.renamed.setdefault(symbol, sympy.Symbol(f"n{len(self.renamed)}", integer=True, positive=True))
        return size.xreplace(self.renamed)

    def undo(self, expression: sympy.Basic) -> sympy.Basic:
        """An expression in our symbols, rewritten in torch's."""
        return expression.xreplace({ours: theirs for theirs, ours in self.renamed.items()})
