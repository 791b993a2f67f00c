"""mla::merge_states: attention to two parts of the keys, merged, is attention to all keys."""

import pytest
import torch

from mla_compile.errors import KernelError
from mla_compile.kernels.merge_states import merge_states_reference

from .errors import assert_as_close_as

merge_states = torch.ops.mla.merge_states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4)], ids=str)
def test_against_float64(shape, dtype):
    o_a, o_b = torch.randn(2, *shape, 9).to(dtype)
    lse_a, lse_b = 10 * torch.randn(2, *shape)
    o, lse = merge_states(o_a, lse_a, o_b, lse_b)
    exact = merge_states_reference(o_a.double(), lse_a.double(), o_b.double(), lse_b.double())
    eager = merge_states_reference(o_a, lse_a, o_b, lse_b)
    assert_as_close_as(eager[0].to(dtype), o, exact[0])
    assert_as_close_as(eager[1], lse, exact[1])


def test_empty_sets():
    o_a, o_b = torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([[0.0], [2.0], [0.0]])
    lse_a, lse_b = torch.tensor([0.5, -torch.inf, -torch.inf]), torch.tensor([-torch.inf, -7.0, -torch.inf])
    o, lse = merge_states(o_a, lse_a, o_b, lse_b)
    assert o.tolist() == [[1.0], [2.0], [0.0]]
    assert lse.tolist() == [0.5, -7.0, -torch.inf]


@pytest.mark.parametrize("cut", [0, 1, 20, 50])
def test_two_parts_of_the_keys_make_the_whole(cut):
    q_latent, q_rope = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 4, 8)
    latent, k_rope = torch.randn(2, 50, 16), torch.randn(2, 50, 8)
    mask = torch.rand(2, 1, 3, 50) < 0.2
    mask[0, 0, 1] = False

    def attend(keys, dtype=torch.float32):
        tensors = (t.to(dtype) for t in (q_latent, q_rope, latent[:, keys], k_rope[:, keys]))
        return torch.ops.mla.latent_attention(*tensors, mask[..., keys], None, 0.2)

    exact = attend(slice(None), torch.float64)
    merged = merge_states(*attend(slice(cut)), *attend(slice(cut, None)))
    for actual, whole, truth in zip(merged, attend(slice(None)), exact, strict=True):
        assert_as_close_as(whole, actual, truth.double(), merges=1)


def test_any_strides():
    o_a, o_b = torch.randn(2, 4, 3, 5).transpose(1, 2)
    lse_a, lse_b = torch.randn(2, 4, 3).transpose(1, 2)
    o, lse = merge_states(o_a, lse_a, o_b, lse_b)
    expected = merge_states(*(t.contiguous() for t in (o_a, lse_a, o_b, lse_b)))
    assert o.is_contiguous()
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    o_a, o_b = torch.randn(2, 3, 4, 5).to(dtype)
    lse_a, lse_b = torch.randn(2, 3, 4)
    torch.library.opcheck(merge_states.default, (o_a, lse_a, o_b, lse_b))


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (0, torch.randn(3), r"expected o_a of shape \[d0, V\], found \[3\]"),
        (2, torch.randn(3, 6), r"expected o_b of shape \[d0, V\] = \[3, 5\], found \[3, 6\]"),
        (2, torch.randn(3, 5).half(), "expected o_b of o_a's torch.float32 on cpu, found torch.float16"),
        (3, torch.randn(4), r"expected lse_b of shape \[d0\] = \[3\], found \[4\]"),
        (3, torch.randn(3).double(), "expected lse_b of lse_a's torch.float32 on cpu, found torch.float64"),
    ],
)
def test_refuses(position, wrong, message):
    arguments = [torch.randn(3, 5), torch.randn(3), torch.randn(3, 5), torch.randn(3)]
    arguments[position] = wrong
    with pytest.raises(KernelError, match=message):
        merge_states(*arguments)
