"""What no one wrote is NaN or infinite, and no product of a library may be given it.

A library may read more of an operand than it multiplies (oneDNN's products of bfloat16 on AMX take the numbers of a row
two at a time, an odd one with the first of the next row), and count on 0 times that being 0. On most machines nothing
of that shows, so what shows here is the operand.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_compile.kernels.expanded_attention.native import expanded_attention_cpu
from mla_compile.kernels.latent_attention.native import latent_attention_cpu
from mla_compile.kernels.merge_states import merge_states_aten
from mla_compile.kernels.paged_expanded_attention import paged_expanded_attention_aten
from mla_compile.kernels.paged_latent_attention.native import paged_latent_attention_cpu
from mla_compile.kernels.per_head_matmul.native import per_head_matmul_cpu
from mla_compile.kernels.sparse_latent_attention.native import sparse_latent_attention_cpu

VALUES = (torch.nan, torch.inf)

_ALLOCATE = frozenset(("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"))
_MULTIPLY = frozenset(("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear"))
_ATTEND = "_scaled_dot_product"
_ON_CPU = {
    torch.ops.mla.expanded_attention.default: expanded_attention_cpu,
    torch.ops.mla.latent_attention.default: latent_attention_cpu,
    torch.ops.mla.merge_states.default: merge_states_aten,
    torch.ops.mla.paged_expanded_attention.default: paged_expanded_attention_aten,
    torch.ops.mla.paged_latent_attention.default: paged_latent_attention_cpu,
    torch.ops.mla.per_head_matmul.default: per_head_matmul_cpu,
    torch.ops.mla.sparse_latent_attention.default: sparse_latent_attention_cpu,
}
"""What is registered: torch does not hand the mode on to the code behind an op."""


class Poisoned(TorchDispatchMode):
    """Memory is `value` until it is written, and the operands of products are asserted to be finite.

    The mla ops and loops are entered. `products` counts what was looked at.
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
        if func in _ON_CPU:
            with self:
                return _ON_CPU[func](*args, **kwargs)
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


def _loop(more, turn, state, operands):
    while more(*state, *operands):
        state = turn(*state, *operands)
    return state


def assert_the_same(actual, expected) -> None:
    """Check results bit by bit. Raises: AssertionError."""
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


values = pytest.mark.parametrize("value", VALUES, ids=str)
