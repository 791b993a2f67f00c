"""Let Inductor split a loop on a CPU only where what it makes of it is the whole loop.

    for i in range(size): f(i // n)    ->    for j in range(size // n): for k in range(n): f(j)

`CppScheduling.try_loop_split` of torch 2.11 to 2.15 does so for n above 8, and leaves out the last elements where n
does not divide the size: of `pages[:, positions // page_size]`, of a bias for each block, of blocks that are repeated
for each token and then cut. It would do so more often with `mla`, for which a mask that otherwise is fused with the
scores is a tensor by itself.
"""

from __future__ import annotations

import functools
from typing import Any

import sympy
from torch._inductor import ir
from torch._inductor.codegen.cpp import CppScheduling
from torch.utils._sympy.functions import FloorDiv


@functools.cache
def split_loops_evenly() -> None:
    """Leave loops whole that Inductor would cut short, from now on in this process."""
    split: Any = CppScheduling.try_loop_split

    @functools.wraps(split)
    def split_evenly(self: CppScheduling, nodes: list[Any]) -> list[Any]:
        whole: list[Any] = split(self, nodes) if all(map(_is_even, nodes)) else nodes
        return whole

    # Inductor has no setting for this, nor a hook.
    CppScheduling.try_loop_split = split_evenly  # type: ignore[method-assign]


def _is_even(node: Any) -> bool:
    """Whether every number that divides a variable of a node's loops divides its size too."""
    if not isinstance(node.node, ir.ComputedBuffer):
        return True
    (sizes, _), body, (variables, _) = node.node.get_default_sizes_body()
    size_of = dict(zip(variables, sizes, strict=False))
    found = set[Any]().union(*(e.find(FloorDiv) for e in body.indexing_exprs.values() if isinstance(e, sympy.Basic)))
    divided = [quotient.args for quotient in found if quotient.args[0] in body.iter_vars]
    return all(x in size_of and sympy.Mod(size_of[x], n) == 0 for x, n in divided)
