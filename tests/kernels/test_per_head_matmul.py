"""`mla::per_head_matmul` against float64, for any strides, one row and many."""

import pytest
import torch

from mla_compile.errors import KernelError
from mla_compile.kernels.per_head_matmul import aten, native, per_head_matmul_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("batch", "queries"), [(1, 1), (1, 3), (2, 1), (2, 5)])
def test_as_close_to_float64_as_a_product_in_its_dtype(implementation, batch, queries, dtype):
    x = torch.randn(batch, queries, 3, 20, dtype=dtype)[..., 2:14]
    weight = torch.randn(3, 21, 12, dtype=dtype)[:, 4:14].transpose(1, 2)
    exact = per_head_matmul_reference(x.double(), weight.double())
    out = torch.ops.mla.per_head_matmul(x, weight)
    assert out.is_contiguous()
    # Each of twelve terms is rounded once in float32, and the sum once in the dtype of the result.
    bound = (12 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps) * exact.abs().max()
    assert (out.double() - exact).abs().max() <= bound


# I and O that fill less than a vector, and several with a remainder; fewer heads than threads, and more.
SIZES = [(1, 1, 1), (2, 3, 5), (1, 37, 67), (9, 66, 33), (3, 128, 64)]


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inner_is_contiguous", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 11])
@pytest.mark.parametrize(("heads", "inner", "outer"), SIZES)
def test_the_native_kernel(monkeypatch, heads, inner, outer, rows, threads, inner_is_contiguous, dtype):
    monkeypatch.setattr(native, "multiply", None)
    monkeypatch.setattr(native, "has_products", lambda _: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = torch.randn(1, rows, heads, inner + 3, dtype=dtype)[..., 3:]
    weight = torch.randn(heads, inner + 2, outer + 1, dtype=dtype)[:, 2:, 1:]
    if inner_is_contiguous:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    exact = per_head_matmul_reference(x.double(), weight.double())
    out = torch.ops.mla.per_head_matmul(x, weight)
    # Each of `inner` multiply-adds is rounded once, by half an eps of the sum of the products' magnitudes. The result
    # is rounded once more in its own dtype, by half an eps or, where it is subnormal, by less than a step.
    sizes = per_head_matmul_reference(x.double().abs(), weight.double().abs())
    rounded = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    allowed = inner * torch.finfo(torch.float32).eps / 2 * sizes + (0 if dtype == torch.float32 else rounded)
    assert ((out.double() - exact).abs() <= allowed * (1 + torch.finfo(dtype).eps)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_library_is_given_no_transposed_matrices_with_gaps_between_them(monkeypatch, dtype):
    """It would write out the transpose of each."""
    given, bmm = [], torch.bmm
    monkeypatch.setattr(aten, "has_products", lambda _: True)
    monkeypatch.setattr(torch, "bmm", lambda a, b, out: given.append(b) or bmm(a, b, out=out))
    both = torch.randn(3, 15, 32, dtype=dtype)
    x, weight = torch.randn(2, 20, 3, 32, dtype=dtype), both[:, 8:].mT
    out = aten.per_head_matmul_aten(x, weight)
    assert given[0].mT.is_contiguous()
    torch.testing.assert_close(out, bmm(x.flatten(0, 1).transpose(0, 1), weight).transpose(0, 1).view(2, 20, 3, 7))
    aten.per_head_matmul_aten(out, weight.mT)
    assert given[1].data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_without_a_librarys_products(monkeypatch, dtype):
    """More rows than the kernel takes: a product in float32, rounded once."""
    monkeypatch.setattr(aten, "has_products", lambda dtype: dtype.itemsize > 2)
    x, weight = torch.randn(3, 40, 2, 20, dtype=dtype), torch.randn(2, 20, 7, dtype=dtype)
    exact = per_head_matmul_reference(x.double(), weight.double())
    out = aten.per_head_matmul_aten(x, weight)
    assert (out.dtype, out.is_contiguous()) == (dtype, True)
    assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5).all()


@pytest.mark.parametrize(("batch", "queries"), [(0, 2), (2, 0)])
def test_no_rows(implementation, batch, queries):
    out = torch.ops.mla.per_head_matmul(torch.randn(batch, queries, 3, 4), torch.randn(3, 4, 5))
    assert out.shape == (batch, queries, 3, 5)


def test_opcheck():
    torch.library.opcheck(torch.ops.mla.per_head_matmul, (torch.randn(2, 3, 4, 5), torch.randn(4, 5, 6)))


def test_a_wrong_weight_is_refused():
    with pytest.raises(KernelError, match=r"expected weight of shape \[N, I, O\] = \[4, 5, 6\], found \[4, 7, 6\]"):
        torch.ops.mla.per_head_matmul(torch.randn(2, 3, 4, 5), torch.randn(4, 7, 6))


def test_gradients_of_a_matrix_a_head():
    operands = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(4, 5, 6, dtype=torch.float64)
    with torch.enable_grad():
        assert torch.autograd.gradcheck(torch.ops.mla.per_head_matmul, [t.requires_grad_() for t in operands])
