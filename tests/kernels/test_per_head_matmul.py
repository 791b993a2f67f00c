"""`mla::per_head_matmul` against float64, for any strides, one row and many."""

import pytest
import torch
from mla_compile.kernels.per_head_matmul import per_head_matmul_reference

from mla_compile.errors import KernelError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("batch", "queries"), [(1, 1), (1, 3), (2, 1), (2, 5)])
def test_as_close_to_float64_as_a_product_in_its_dtype(batch, queries, dtype):
    x = torch.randn(batch, queries, 3, 20, dtype=dtype)[..., 2:14]
    weight = torch.randn(3, 21, 12, dtype=dtype)[:, 4:14].transpose(1, 2)
    exact = per_head_matmul_reference(x.double(), weight.double())
    out = torch.ops.mla.per_head_matmul(x, weight)
    assert out.is_contiguous()
    # Twelve products of a row and a column, each term rounded once on the way in, the sum once on the way out.
    bound = (12 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps) * exact.abs().max()
    assert (out.double() - exact).abs().max() <= bound


def test_opcheck():
    torch.library.opcheck(torch.ops.mla.per_head_matmul, (torch.randn(2, 3, 4, 5), torch.randn(4, 5, 6)))


def test_a_wrong_weight_is_refused():
    with pytest.raises(KernelError, match=r"expected weight of shape \[N, I, O\] = \[4, 5, 6\], found \[4, 7, 6\]"):
        torch.ops.mla.per_head_matmul(torch.randn(2, 3, 4, 5), torch.randn(4, 7, 6))
