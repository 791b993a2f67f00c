"""Operands of a library's matrix products are finite, whatever unwritten memory and unseen rows of a cache hold.

This tests every way to compute an op on CPU; `triton/test_finite_products.py` tests the Triton kernels.
"""

import dataclasses
import sys

import pytest
import torch

from mla_compile.kernels import decompositions, native
from mla_compile.kernels.expanded_attention import native as expanded_attention
from mla_compile.kernels.latent_attention import cached

from .poison import Poisoned, assert_the_same, values
from .unseen import MAKE

DTYPES = [torch.float32, torch.bfloat16]
POISON = "MLA_COMPILE_TESTS_POISON"


@pytest.fixture
def values_are_not_read(monkeypatch):
    """Let the ops read no value of a mask or table, as on a GPU, where that would stall the device."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mla_compile.kernels") and hasattr(module, "reads_values"):
            monkeypatch.setattr(module, "reads_values", lambda tensor: False)


@pytest.fixture(scope="module")
def poisoned_header(tmp_path_factory):
    """A `vector.h` whose buffers hold the number in an environment variable until they are written."""
    header = tmp_path_factory.mktemp("poisoned") / "vector.h"
    text = native.VECTOR.read_text()
    constructor = "ALIGNMENT))) {}"
    assert text.count(constructor) == 1
    filled = f'ALIGNMENT))) {{ std::fill_n(data_, size, std::strtof(std::getenv("{POISON}"), nullptr)); }}'
    header.write_text("#include <cstdlib>\n" + text.replace(constructor, filled))
    return header


@pytest.fixture(params=["nan", "inf"])
def poisoned_buffers(request, poisoned_header, monkeypatch):
    """Build the C++ kernels of a dtype with such buffers, which hold NaN or infinity."""
    dtype = request.getfixturevalue("dtype")
    monkeypatch.setenv(POISON, request.param)
    for module in (expanded_attention, cached):
        sources = (poisoned_header, *module.KERNELS.sources[1:])
        monkeypatch.setattr(module, "KERNELS", dataclasses.replace(module.KERNELS, sources=sources))
    assert expanded_attention.KERNELS.of(dtype) is not None
    assert cached.KERNELS.of(dtype, dtype, dtype) is not None


def compute(problem):
    return getattr(torch.ops.mla, problem.op).default(*problem.arguments, **problem.more)


def compute_decomposed(problem):
    op = getattr(torch.ops.mla, problem.op).default
    return decompositions.decompositions()[op](*problem.arguments, **problem.more)


def assert_finite(make, dtype, value, compute):
    torch.manual_seed(0)
    expected = compute(make(dtype, 0.0))
    assert expected[0].isfinite().all()
    torch.manual_seed(0)
    problem = make(dtype, value)
    with Poisoned(value) as poisoned:
        actual = compute(problem)
    assert_the_same(actual, expected)
    return poisoned.products


@pytest.mark.diagonal
@values
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.usefixtures("implementation")
def test_on_cpu(make, dtype, value):
    assert_finite(make, dtype, value, compute)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.usefixtures("poisoned_buffers")
def test_buffers_of_the_kernels(make, dtype):
    assert_finite(make, dtype, torch.nan, compute)


@pytest.mark.diagonal
@values
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.usefixtures("no_compiler", "values_are_not_read")
def test_where_values_are_not_read(make, dtype, value):
    assert assert_finite(make, dtype, value, compute)


@pytest.mark.diagonal
@values
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_decompositions(make, dtype, value):
    assert assert_finite(make, dtype, value, compute_decomposed)


@values
def test_a_product_that_is_given_what_no_one_wrote_is_found(value):
    with Poisoned(value), pytest.raises(AssertionError, match=r"operand 1 of aten.bmm.default, \[1, 3, 2\]"):
        torch.bmm(torch.zeros(1, 2, 3), torch.empty(1, 3, 2))
