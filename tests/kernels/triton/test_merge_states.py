"""The Triton kernel of mla::merge_states, against the reference in float64."""

import pytest
import torch

from mla_compile.kernels.merge_states import merge_states_reference
from mla_compile.kernels.merge_states.arguments import MergeStates
from mla_compile.kernels.merge_states.triton import merge_states_triton

from ..errors import assert_as_close_as
from .where import ON_GPU, to_device

pytestmark = [*ON_GPU]


def run(*tensors):
    return [t.cpu() for t in merge_states_triton(MergeStates(*to_device(tensors)))]


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("columns", [1, 9, 128, 600])
def test_against_float64(shape, columns, dtype):
    o_a, o_b = torch.randn(2, *shape, columns).to(dtype)
    lse_a, lse_b = 10 * torch.randn(2, *shape)
    o, lse = run(o_a, lse_a, o_b, lse_b)
    exact = merge_states_reference(o_a.double(), lse_a.double(), o_b.double(), lse_b.double())
    eager = merge_states_reference(o_a, lse_a, o_b, lse_b)
    assert_as_close_as(eager[0].to(dtype), o, exact[0])
    assert_as_close_as(eager[1], lse, exact[1])


def test_empty_sets():
    o_a, o_b = torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([[0.0], [2.0], [0.0]])
    lse_a, lse_b = torch.tensor([0.5, -torch.inf, -torch.inf]), torch.tensor([-torch.inf, -7.0, -torch.inf])
    o, lse = run(o_a, lse_a, o_b, lse_b)
    assert o.tolist() == [[1.0], [2.0], [0.0]]
    assert lse.tolist() == [0.5, -7.0, -torch.inf]


def test_any_strides_and_nothing():
    o_a, o_b = torch.randn(2, 4, 3, 5).transpose(1, 2)
    lse_a, lse_b = torch.randn(2, 4, 3).transpose(1, 2)
    o, lse = run(o_a, lse_a, o_b, lse_b)
    expected = run(*(t.contiguous() for t in (o_a, lse_a, o_b, lse_b)))
    assert torch.equal(o, expected[0])
    assert torch.equal(lse, expected[1])
    assert run(o_a[:0], lse_a[:0], o_b[:0], lse_b[:0])[0].shape == (0, *o_a.shape[1:])
