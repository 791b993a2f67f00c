"""The order of a tensor's dimensions in memory, for sizes that are known and for symbols."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mla_compile.passes.nodes.memory_order import inverse, order_of


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.empty(2, 3, 4), (0, 1, 2)),
        (torch.empty(2, 3, 4).permute(1, 2, 0), (2, 0, 1)),
        (torch.empty(2, 3, 1).transpose(1, 2), (0, 2, 1)),
        (torch.empty(1, 1), (0, 1)),
        (torch.empty(()), ()),
    ],
)
def test_by_decreasing_stride(tensor, order):
    assert order_of(tensor) == order


def test_symbols_are_ordered_without_guards():
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment) as mode:
        tensor = mode.from_tensor(torch.empty(5, 7, 3), static_shapes=False).permute(2, 0, 1)
    guards = len(environment.guards)
    assert order_of(tensor) == (1, 2, 0)
    assert len(environment.guards) == guards


def test_the_inverse_brings_dimensions_back():
    tensor, order = torch.empty(2, 3, 5, 7), (2, 0, 3, 1)
    assert tensor.permute(order).permute(inverse(order)).shape == tensor.shape
