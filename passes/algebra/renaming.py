"""Sizes with their symbols renamed in the order in which they come: the layers of a model say the same then.

A cache of 27 layers has 27 lengths for torch, which happen to be equal.
"""

from __future__ import annotations

import sympy

from .sizes import Size


class Renaming:
    """One symbol of our own for each of torch's: `n0`, `n1`, ..., positive integers."""

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
        """An expression in our symbols in torch's."""
        return expression.xreplace({ours: theirs for theirs, ours in self.renamed.items()})
