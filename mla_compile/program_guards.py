"""Find where an exported program holds for fewer sizes than its ranges allow.

Code that compares sizes of several inputs, such as `if x.shape[1] < cache.shape[1]`, is exported as the side that the
example takes, with a guard. `program.module()` checks guards; AOTInductor drops them, and its package takes the same
side for other sizes too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

_TRIED = 64
"""Random sizes at which a guard is tried, besides the least and the greatest."""
_MANY = 1 << 16
"""The size that is tried where a range has no end."""


def broken_guards(program: ExportedProgram) -> list[str]:
    """The guards on sizes of several inputs that sizes within the program's ranges break, in terms of its inputs."""
    names, env = _sizes(program)
    if env is None:
        return []
    found = []
    for guard in env.guards:
        condition = guard.expr.xreplace(env.replacements)
        symbols = sorted(condition.free_symbols, key=str)
        # A guard on a single size is a range.
        if len(symbols) > 1 and all(each in names for each in symbols):
            ranges = {each: program.range_constraints[each] for each in symbols if each in program.range_constraints}
            if len(ranges) == len(symbols) and _breaks(condition, ranges):
                found.append(str(condition.xreplace({each: names[each] for each in symbols})))
    return list(dict.fromkeys(found))


def _sizes(program: ExportedProgram) -> tuple[dict[sympy.Symbol, sympy.Symbol], ShapeEnv | None]:
    """For each symbol the size that it is of an input, and where the guards are."""
    names: dict[sympy.Symbol, sympy.Symbol] = {}
    env = None
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                env = size.node.shape_env
                symbol = size.node.expr
                if symbol.is_symbol:
                    names.setdefault(symbol, sympy.Symbol(f"{node.name}.shape[{dim}]"))
    return names, env


def _breaks(condition: sympy.Basic, ranges: Mapping[sympy.Symbol, ValueRanges[sympy.Expr]]) -> bool:
    return any(condition.subs(sizes) == sympy.false for sizes in _tried(ranges))


def _tried(ranges: Mapping[sympy.Symbol, ValueRanges[sympy.Expr]]) -> Iterator[dict[sympy.Symbol, int]]:
    """Sizes within the ranges: all combinations of the least and the greatest, then random ones."""
    ends = {each: _ends(range_) for each, range_ in ranges.items()}
    for sizes in itertools.islice(itertools.product(*ends.values()), _TRIED):
        yield dict(zip(ends, sizes, strict=True))
    drawn = random.Random(0)
    for _ in range(_TRIED):
        yield {each: drawn.randint(least, most) for each, (least, most) in ends.items()}


def _ends(range_: ValueRanges[sympy.Expr]) -> tuple[int, int]:
    least = int(range_.lower) if isinstance(range_.lower, sympy.Integer) else 0
    return least, int(range_.upper) if isinstance(range_.upper, sympy.Integer) else least + _MANY
