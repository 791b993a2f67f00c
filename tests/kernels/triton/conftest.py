"""Repair and speed up Triton's interpreter, where it runs the kernels, and poison unwritten memory."""

import numpy as np
import pytest
import torch

from mla_compile.kernels._common import parts

from ..poison import Poisoned
from .where import INTERPRETED


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that a kernel does not write is NaN, and no library's matrix product may be given it."""
    with Poisoned(torch.nan) as poisoned:
        yield poisoned


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch):
    """Triton 3.9's interpreter keeps bfloat16 as its bits and multiplies those: give it the numbers."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype != interpreter.tl.bfloat16:
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, interpreter.tl.float32)

    def create_dot_of_numbers(self, a, b, *rest):
        return create_dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot_of_numbers)


@pytest.fixture(autouse=True)
def in_less_time():
    """Skip work of the interpreter whose results are not used; with any NumPy."""
    if not INTERPRETED:
        yield
        return
    from tests.quick_interpreter import quick_interpreter

    with quick_interpreter():
        yield


@pytest.fixture(autouse=True)
def assembly():
    """Let the interpreter run a kernel's inline assembly."""
    if not INTERPRETED:
        yield
        return
    from tests.assembly import emulated_assembly

    with emulated_assembly():
        yield


@pytest.fixture(autouse=True)
def launches_do_not_overlap(monkeypatch):
    """The interpreter has no instructions by which a kernel begins before the last has ended; it has ended there."""
    if INTERPRETED:
        from mla_compile.kernels._common import combine
        from mla_compile.kernels.paged_latent_attention import taken

        for module, name in ((combine, "gdc_wait"), (taken, "gdc_launch_dependents")):
            monkeypatch.setattr(module, name, lambda: None)


@pytest.fixture(autouse=True)
def infinities_are_numbers():
    """Let numpy not warn of an overflow to infinity or of log(0), of which a GPU does not warn either."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def combined_in_few_programs(monkeypatch):
    """Let a program that combines parts take all columns of many rows: the interpreter takes no longer for them."""
    if INTERPRETED:
        monkeypatch.setattr(parts, "_MOST_ROWS", 64)
        monkeypatch.setattr(parts, "_COMBINING", 1 / 4)
        monkeypatch.setattr(parts, "_COLUMNS", 512)
        monkeypatch.setattr(parts, "_NUMBERS", 1 << 20)
