"""Which of two paths a run takes: the faster one, by the cost model's times at the sizes of that run."""

import pytest
import sympy
import torch
from torch.utils._sympy.functions import Max

from mla_compile.passes.paths.either import first_is_faster

s, t = sympy.symbols("s t", integer=True, positive=True)
LONG = Max(0, s - 7)


@pytest.mark.parametrize(
    ("absorbed", "chunked"),
    [
        ((s * t, sympy.Integer(3)), (3 * s + 40, t)),
        ((LONG * t + s, sympy.Integer(1)), (s**2, sympy.Rational(1, 3) * LONG)),
    ],
)
def test_the_faster_path_is_taken(absorbed, chunked):
    taken = set()
    for sizes in ({s: 2, t: 3}, {s: 9, t: 100}, {s: 30, t: 1}):
        expected = max(e.subs(sizes) for e in absorbed) <= max(e.subs(sizes) for e in chunked)
        found = first_is_faster(absorbed, chunked, lambda size, sizes=sizes: int(sympy.sympify(size).subs(sizes)))
        assert found.dtype == torch.bool
        assert bool(found) == bool(expected)
        taken.add(bool(found))
    assert taken == {True, False}
