"""Arrays of whole numbers and the forms that describe them."""

from __future__ import annotations

import numpy as np

from mla_compile.passes.algebra import operations
from mla_compile.passes.algebra.terms import Form
from tests.passes.meaning import World


def world_of(**tensors: np.ndarray) -> tuple[World, list[Form]]:
    return World(dict(tensors)), [operations.leaf(name, array.shape) for name, array in tensors.items()]


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(-5, 6, shape).astype(float)
