"""Make unwritten memory NaN or infinite, and fail if the operand of a library's matrix product holds any of it.

A library may read more of an operand than it should multiply, multiply the rest by 0, and count on the result being 0:
oneDNN's products of bfloat16 on AMX take the numbers of a row two at a time, an odd one with the first of the next row.
On most machines this does not show in results, so the operands themselves are checked.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

VALUES = (torch.nan, torch.inf)

_ALLOCATE = frozenset(("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"))
_MULTIPLY = frozenset(("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear"))
_ATTEND = "_scaled_dot_product"


class Poisoned(TorchDispatchMode):
    """Memory is `value` until it is written, and the operands of products are asserted to be finite.

    So are those within loops and within the mla ops, in C++ and in Python. `products` counts the products checked.
    """

    supports_higher_order_operators = True

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.higher_order.while_loop:
            with self:
                return _loop(*args)
        if func.namespace == "mla":
            with self:
                return func.redispatch(_implementation_for(args), *args, **kwargs)
        name = func._schema.name.partition("::")[2].rstrip("_")
        if name in _MULTIPLY or name.startswith(_ATTEND):
            self._check(func, name, args, kwargs)
        out = func(*args, **kwargs)
        if name in _ALLOCATE and out.is_floating_point():
            out.fill_(self.value)
        return out

    def _check(self, func, name, args, kwargs):
        self.products += 1
        operands = [t for t in args if isinstance(t, torch.Tensor)]
        if name.startswith(_ATTEND):
            operands = operands[:3]  # a mask may be -inf
        elif name in ("addmm", "baddbmm", "addbmm", "addmv") and kwargs.get("beta", 1) == 0:
            operands = operands[1:]
        for i, operand in enumerate(operands):
            assert operand.isfinite().all(), f"operand {i} of {func}, {list(operand.shape)}, is not finite"


def _implementation_for(args):
    device = next(t.device for t in args if isinstance(t, torch.Tensor))
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.type.upper()))


def _loop(more, turn, state, operands):
    while more(*state, *operands):
        state = turn(*state, *operands)
    return state


def assert_the_same(actual, expected) -> None:
    """Check results bit by bit. Raises: AssertionError."""
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


values = pytest.mark.parametrize("value", VALUES, ids=str)
