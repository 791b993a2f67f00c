"""Products of few rows as sums: right to the dtype's rounding, and only where they stream the weights."""

import pytest
import torch

from mla_compile.inductor.streamed_products import FEW_ROWS, grouped_mm_of_few_rows, mm_of_one_row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_is_the_product(dtype):
    row, weight = torch.randn(1, 300, dtype=torch.float64), torch.randn(17, 300, dtype=torch.float64)
    row, weight = row.to(dtype), weight.to(dtype)
    actual = mm_of_one_row(row, weight.t())
    exact = row.double() @ weight.double().t()
    # Rounded once to the dtype, after 300 additions in float32 or better, each off by at most an eps of the sum of all
    # absolute terms.
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


COUNTS = {
    "one each": (1, 1, 1, 1),
    "none first, none last": (0, 3, 1, 0),
    "all of one": (0, 0, 4, 0),
    "fewer than rows": (1, 0, 1, 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_each_row_meets_its_own_matrix(counts, dtype):
    rows, weights = torch.randn(4, 96, dtype=torch.float64), torch.randn(4, 40, 96, dtype=torch.float64)
    rows, weights = rows.to(dtype), weights.to(dtype)
    offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    actual = grouped_mm_of_few_rows(rows, weights.mT, offsets)
    experts = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    grouped = len(experts)
    exact = torch.einsum("sk,smk->sm", rows[:grouped].double(), weights[experts].double())
    terms = torch.einsum("sk,smk->sm", rows[:grouped].double().abs(), weights[experts].double().abs()).max()
    allowed = torch.finfo(dtype).eps * exact.abs().max() + 96 * torch.finfo(torch.float32).eps * terms
    assert actual.dtype == dtype
    assert actual.shape == (4, 40)
    assert (actual[:grouped].double() - exact).abs().max() <= allowed


def test_leaves_other_groups_to_the_library():
    rows, weights, offsets = torch.ones(4, 8), torch.ones(3, 5, 8), torch.tensor([1, 2, 4], dtype=torch.int32)
    many = torch.ones(FEW_ROWS + 1, 8)
    assert grouped_mm_of_few_rows(many, weights.mT, offsets) is NotImplemented
    assert grouped_mm_of_few_rows(rows, torch.ones(3, 8, 5), offsets) is NotImplemented
    assert grouped_mm_of_few_rows(rows.expand(3, 4, 8), weights.mT) is NotImplemented
    assert grouped_mm_of_few_rows(rows.to("meta"), weights.mT.to("meta"), offsets.to("meta")) is NotImplemented
