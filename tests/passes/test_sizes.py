"""Sizes say what the guards say, in the symbols that torch has kept."""

import sympy
import torch
from mla_compile.passes.axes import same
from mla_compile.passes.sizes import size_of
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext


def test_an_equation_that_torch_has_solved_is_not_solved_otherwise():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    sizes = [mode.from_tensor(torch.zeros(n), symbolic_context=context).shape[0] for n in (11, 11, 8, 8, 3, 3)]
    past, new, mask = next(  # torch puts the sum in the place of `mask`, by name the first of the three
        (a, b, c) for c in sizes[:2] for a in sizes[2:4] for b in sizes[4:] if str(c) == min(map(str, (a, b, c)))
    )
    before = [size_of(n) for n in (past, new)]
    assert mask == past + new  # a guard
    assert same(size_of(mask), size_of(past + new))
    for size, earlier in zip((past, new), before, strict=True):
        assert same(size_of(size), sympy.sympify(size.node.expr))
        assert same(earlier, size_of(size))
