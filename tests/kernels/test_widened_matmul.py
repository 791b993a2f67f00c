"""`mla::widened_matmul` against float64, for any strides, few rows and many, with groups and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_compile.errors import KernelError
from mla_compile.kernels.widened_matmul import aten, native, widened_matmul_reference

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
MANY = native.MOST_ROWS + 5


def assert_close(out: Tensor, x: Tensor, weight: Tensor, ends: Tensor | None = None) -> None:
    """Check against float64: products and sums are rounded once, by half an eps of the sum of products' magnitudes."""
    doubles = x.double(), weight.double()
    exact = widened_matmul_reference(*doubles, ends)
    sizes = widened_matmul_reference(*(t.abs() for t in doubles), ends)
    rows = slice(None if ends is None else int(ends[-1]))
    assert (out.shape, out.dtype, out.is_contiguous()) == (exact.shape, torch.float32, True)
    allowed = x.shape[1] * torch.finfo(torch.float32).eps * sizes
    assert ((out - exact).abs() <= allowed)[rows].all()


def with_columns_apart(weight: Tensor) -> Tensor:
    """The same weight `[..., K, M]`, with contiguous rows instead of contiguous columns."""
    return weight.contiguous()


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 11, native.MOST_ROWS, MANY])
@pytest.mark.parametrize("as_a_linear", [True, False])
def test_rows_times_a_weight(implementation, dtype, rows, as_a_linear):
    x = torch.randn(rows, 50, dtype=dtype)[:, 3:40]
    weight = torch.randn(29, 45, dtype=dtype)[:, 2:39].t()
    weight = weight if as_a_linear else with_columns_apart(weight)
    assert_close(torch.ops.mla.widened_matmul(x, weight), x, weight)


COUNTS = {
    "one each": (1, 1, 1, 1),
    "none first, none last": (0, MANY, 2, 0),
    "all of one": (0, 0, 4, 0),
    "rows of no group": (3, 0, 1, 0),
    "no rows": (0, 0, 0, 0),
}


@DTYPES
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_rows_by_groups(implementation, dtype, counts, integers):
    ends = torch.tensor(counts, dtype=integers).cumsum(0, dtype=integers)
    x = torch.randn(int(ends[-1]) + (counts == COUNTS["rows of no group"]) * 2, 37, dtype=dtype)
    weight = torch.randn(4, 29, 37, dtype=dtype).mT
    assert_close(torch.ops.mla.widened_matmul(x, weight, ends), x, weight, ends)


# K and M that fill less than a vector and a tile, and more terms than are summed at a time.
SIZES = [(1, 1), (5, 2), (37, 67), (2051, 7), (4100, 4)]


@pytest.mark.diagonal
@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 11])
@pytest.mark.parametrize(("inner", "outer"), SIZES)
def test_the_native_kernel(monkeypatch, inner, outer, rows, threads, dtype):
    monkeypatch.setattr(native, "multiply_by_panels", None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    # Memory beside the operands is NaN.
    x = torch.full((rows, inner + 3), torch.nan, dtype=dtype)
    weight = torch.full((outer, inner + 5), torch.nan, dtype=dtype)
    x[:, 1:-2], weight[:, 2:-3] = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
    x, weight = x[:, 1:-2], weight[:, 2:-3].t()
    assert_close(torch.ops.mla.widened_matmul(x, weight), x, weight)


def test_panels_are_no_wider_than_they_may_be(monkeypatch):
    widths = []
    mm = torch.mm

    def watched(x: Tensor, panel: Tensor, out: Tensor) -> Tensor:
        widths.append(panel.shape[1])
        return mm(x, panel, out=out)

    monkeypatch.setattr(aten, "PANEL_BYTES", 100 * 8 * 4)
    monkeypatch.setattr(aten.torch, "mm", watched)
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(250, 8).bfloat16().t()
    out = aten.widened_matmul_aten(x, weight)
    monkeypatch.undo()
    assert widths == [100, 100, 50]
    assert_close(out, x, weight)


@pytest.mark.parametrize(("rows", "inner", "outer"), [(0, 4, 5), (2, 0, 5), (MANY, 0, 5), (2, 4, 0), (MANY, 4, 0)])
def test_nothing(implementation, rows, inner, outer):
    x, weight = torch.ones(rows, inner).bfloat16(), torch.ones(outer, inner).bfloat16().t()
    out = torch.ops.mla.widened_matmul(x, weight)
    assert torch.equal(out, torch.full((rows, outer), float(inner)))


def test_double_precision_stays(implementation):
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    torch.testing.assert_close(torch.ops.mla.widened_matmul(x, weight), x @ weight)


def test_opcheck():
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(2, 5, 8).bfloat16().mT
    torch.library.opcheck(torch.ops.mla.widened_matmul, (x, weight[0]))
    torch.library.opcheck(torch.ops.mla.widened_matmul, (x, weight, torch.tensor([1, 3])))


@pytest.mark.parametrize("ends", [(1, 4), (2, 1), (-1, 2)])
def test_ends_outside_the_rows_are_refused(implementation, ends):
    x, weight = torch.ones(3, 8).bfloat16(), torch.ones(2, 5, 8).bfloat16().mT
    with pytest.raises(ValueError, match="expected ends that ascend to at most 3, found"):
        torch.ops.mla.widened_matmul(x, weight, torch.tensor(ends))


def test_a_wrong_weight_is_refused(implementation):
    with pytest.raises(KernelError, match=r"expected weight of shape \[K, M\] = \[8, 5\], found \[7, 5\]"):
        torch.ops.mla.widened_matmul(torch.ones(3, 8), torch.ones(7, 5))
    with pytest.raises(KernelError, match=r"expected ends in int32 or int64 on cpu, found torch.float32 on cpu"):
        torch.ops.mla.widened_matmul(torch.ones(3, 8), torch.ones(1, 8, 5), torch.ones(1))
