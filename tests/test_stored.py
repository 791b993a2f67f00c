"""Guards are read back as they were written."""

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from mla_compile.stored import _true

s, t = sympy.symbols("s0 s1", integer=True, positive=True)
SIZES = [FloorDiv(s, 2), FloorDiv(-s, 16), Max(0, s - 7), Min(s, t), Mod(s, 4), PythonMod(s, 4)]


@pytest.mark.parametrize("size", SIZES)
def test_a_guard_on_sizes_that_are_no_polynomial(size):
    value = int(size.subs({s: 9, t: 5}))
    assert _true(str(sympy.Ge(size * t + s, value * 5 + 9)), {"s0": 9, "s1": 5})
    assert not _true(str(sympy.Ge(size * t + s, value * 5 + 10)), {"s0": 9, "s1": 5})
