"""Run a kernel's inline assembly in Triton's interpreter, which does not: a few instructions of PTX, in numpy."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

DTYPES = {tl.float16: np.float16}


@contextlib.contextmanager
def emulated_assembly() -> Iterator[None]:
    with mock.patch.object(tl, "inline_asm_elementwise", _elementwise):
        yield


def _elementwise(
    asm: Any, constraints: Any, args: Sequence[Any], dtype: Sequence[Any], is_pure: bool, pack: int, **_: object
) -> tuple[Any, ...]:
    """Elements of 16 bits, two in each register, as `tl.inline_asm_elementwise` has them."""
    assert is_pure
    bits = executed(str(getattr(asm, "value", asm)), constraints, pack, *(words.handle.data for words in args))
    return tuple(
        tl.tensor(TensorHandle(found.view(DTYPES[kind]), kind), args[0].type.with_element_ty(kind))
        for found, kind in zip(bits, dtype, strict=True)
    )


def executed(asm: str, constraints: str, pack: int, *inputs: np.ndarray) -> list[np.ndarray]:
    """The outputs, of 16 bits an element; two elements that follow each other are in one register."""
    outputs = constraints.split(",")[: -len(inputs)]
    assert all(constraint in ("=r", "=&r") for constraint in outputs)
    assert constraints.split(",")[len(outputs) :] == ["r"] * len(inputs)
    assert pack == 2
    registers: dict[str, Any] = {}
    for i, words in enumerate(inputs, len(outputs)):
        assert words.itemsize == 2
        flat = np.ascontiguousarray(words).reshape(-1)
        registers[f"${i}"] = np.concatenate([flat, flat[: len(flat) % 2]]).view(np.uint32)
    with np.errstate(invalid="ignore"):
        for line in asm.strip("{} \n").split(";"):
            if line.strip() and not line.strip().startswith(".reg"):
                _execute(line.strip(), registers)
    found = [registers[f"${i}"].view(np.uint16)[: inputs[0].size].reshape(inputs[0].shape) for i in range(len(outputs))]
    return [bits.view(np.int16) for bits in found]


def _execute(line: str, registers: dict[str, Any]) -> None:
    name, operands = line.split(maxsplit=1)
    target, *sources = (part.strip() for part in re.split(r",(?![^{]*})", operands))
    values = [registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources]
    if name == "mov.b32" and target.startswith("{"):
        low, high = (part.strip() for part in target.strip("{}").split(","))
        registers[low], registers[high] = values[0] & 0xFFFF, values[0] >> 16
    elif name == "mov.b32":
        registers[target] = np.full_like(next(iter(registers.values())), values[0])
    else:
        registers[target] = INSTRUCTIONS[name](*values)


def _from_e4m3(pair: Any) -> Any:
    """Two codes in 16 bits: the number of the lower byte in the lower half."""
    codes = np.stack([pair & 0xFF, pair >> 8], -1).astype(np.uint8)
    numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float16)
    return numbers.view(torch.int16).numpy().view(np.uint32)[..., 0]


def _permuted(a: Any, b: Any, selector: Any) -> Any:
    """Four bytes of eight: those of a are 0 to 3, those of b 4 to 7; the lowest digit chooses the lowest byte."""
    eight = [source >> 8 * i & 0xFF for source in (a, b) for i in range(4)]
    return sum((eight[int(selector) >> 4 * i & 7] << 8 * i for i in range(4)), np.zeros_like(a))


INSTRUCTIONS = {
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
    "prmt.b32": _permuted,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "add.u32": lambda a, b: a + b,
    "add.rn.f16x2": lambda a, b: (a.view(np.float16) + b.view(np.float16)).view(np.uint32),
    "mul.rn.f16x2": lambda a, b: (a.view(np.float16) * b.view(np.float16)).view(np.uint32),
}
