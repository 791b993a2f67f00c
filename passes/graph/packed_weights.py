"""Unpack weights of 4 bits an element that an op of a library takes in a layout of its own.

Nothing promises these layouts, and one of them depends on the CPU. So each is compared with what the op itself computes
from an identity, once, before anything relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

_K, _N = 64, 128
"""The width and the rows of the weight that is tried; layouts have blocks of 32 or 64 rows."""


def int4_pack(given: Mapping[str, Any]) -> Tensor:
    """The weight `[N, K]` of `torch._weight_int4pack_mm_for_cpu`, from its arguments."""
    block = block_of_int4_pack()
    assert block is not None
    codes = _halves(given["mat2"], block)
    numbers = given["qScaleAndZeros"].repeat_interleave(given["qGroupSize"], 0)  # [K, N, 2]
    scales, zeros = numbers.unbind(-1)
    return (codes.to(scales.dtype) - 8) * scales.T + zeros.T


def nf4_pack(given: Mapping[str, Any]) -> Tensor:
    """The weight `[N, K]` of `bitsandbytes::gemv_4bit` as the CPU takes it, from its arguments."""
    codes = _pairs(given["B"].reshape(given["shapeB"][0], -1))
    scales = given["absmax"].repeat_interleave(given["blocksize"], 0)  # [K, N]
    return given["code"][codes.long()] * scales.T


def is_known(name: str, given: Mapping[str, Any]) -> bool:
    """Whether the layout of the weight is known for an op of this name with these arguments."""
    if name == "aten::_weight_int4pack_mm_for_cpu":
        block = block_of_int4_pack()
        return block is not None and given["mat2"].shape[0] % block == 0
    if name == "bitsandbytes::gemv_4bit":
        there = given["B"].device.type == "cpu" and given["B"].dtype == torch.uint8 and given["absmax"].dim() == 2
        return there and given["shapeB"][0] % 32 == 0 and _pairs_are_right()
    return True


@cache
def block_of_int4_pack() -> int | None:
    """How many rows a block of `torch._weight_int4pack_mm_for_cpu` has on this CPU; None if it has another layout."""
    with unset_fake_temporarily(), torch.no_grad():
        packed = _bytes()
        numbers = torch.tensor([1.0, 0.0]).repeat(_K // 32, _N, 1).bfloat16()
        found = torch._weight_int4pack_mm_for_cpu(torch.eye(_K).bfloat16(), packed, 32, numbers).T
        return next((block for block in (64, 32) if torch.equal(found, _halves(packed, block).bfloat16() - 8)), None)


@cache
def _pairs_are_right() -> bool:
    """Whether `_pairs` is the layout of bitsandbytes: the op gives each of the 16 codes a number of its own."""
    with unset_fake_temporarily(), torch.no_grad():
        packed, code = _bytes(), torch.arange(-8.0, 8.0)
        of_op: Callable[..., Tensor] = torch.ops.bitsandbytes.gemv_4bit.default
        ones = torch.ones(1, _N, dtype=torch.bfloat16)
        found = of_op(torch.eye(_K).bfloat16(), packed, [_N, _K], ones, code, _K).T
        numbers = [set(found[_pairs(packed) == each].tolist()) for each in range(16)]
        return all(len(own) == 1 for own in numbers) and len(set.union(*numbers)) == 16


def _bytes() -> Tensor:
    return torch.randint(0, 256, (_N, _K // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def _halves(packed: Tensor, block: int) -> Tensor:
    """Codes `[N, K]` of bytes `[N, K / 2]`: in blocks of rows, a byte holds an element of each half of a column."""
    rows, half = packed.shape
    columns = packed.reshape(rows // block, 2 * half, block // 2)
    return torch.cat([columns & 15, columns >> 4], -1).transpose(1, 2).reshape(rows, 2 * half)


def _pairs(packed: Tensor) -> Tensor:
    """Codes `[N, K]` of bytes `[N, K / 2]`: in blocks of 32 rows, 32 bytes hold two columns, whose elements alternate;
    the first half of them in the low bits, the second in the high ones."""
    rows, half = packed.shape
    columns = packed.reshape(rows // 32, half, 32)
    both = torch.cat([columns & 15, columns >> 4], -1).reshape(rows // 32, half, 32, 2)
    return both.transpose(1, 2).reshape(rows, 2 * half)
