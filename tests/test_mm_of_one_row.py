"""Products of one row as sums: right to the dtype's rounding, and only where they stream the weight."""

import pytest
import torch

from mla_compile.mm_of_one_row import mm_of_one_row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_is_the_product(dtype):
    row, weight = torch.randn(1, 300, dtype=torch.float64), torch.randn(17, 300, dtype=torch.float64)
    row, weight = row.to(dtype), weight.to(dtype)
    actual = mm_of_one_row(row, weight.t())
    exact = row.double() @ weight.double().t()
    # Rounded once to the dtype; 300 sums in float32 or better, each of at most its share of an eps of the terms' sum.
    terms = (row.double().abs() @ weight.double().abs().t()).max()
    accumulated = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    allowed = torch.finfo(dtype).eps * exact.abs().max() + 300 * accumulated * terms
    assert actual.dtype == dtype
    assert actual.shape == (1, 17)
    assert (actual.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize(
    ("row", "matrix"),
    [
        (torch.ones(2, 8), torch.ones(5, 8).t()),
        (torch.ones(1, 8), torch.ones(8, 5)),
        (torch.ones(1, 8, dtype=torch.int64), torch.ones(5, 8, dtype=torch.int64).t()),
        (torch.ones(1, 8, device="meta"), torch.ones(5, 8, device="meta").t()),
    ],
    ids=["two rows", "rows of the matrix contiguous", "integers", "another device"],
)
def test_leaves_other_products_to_the_library(row, matrix):
    assert mm_of_one_row(row, matrix) is NotImplemented
