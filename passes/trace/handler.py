"""What a handler is: a function that gives the form of one kind of op's result, from the forms of its operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import fx
from torch.utils._ordered_set import OrderedSet

from ..algebra import elementwise, operations
from ..algebra.terms import Form
from ..nodes.arguments import is_tensor
from ..nodes.by_op import ByOp
from ..nodes.shapes import shape_of


class Forms(Protocol):
    """The forms of the nodes before the one that is handled."""

    def __getitem__(self, node: fx.Node, /) -> Form: ...


Handler: TypeAlias = Callable[[Forms, fx.Node], Form]


class Handlers(ByOp[Handler]):
    """Handlers by their ops."""


def pointwise(trace: Forms, node: fx.Node) -> Form:
    """The handler of elementwise ops on broadcast operands."""
    operands = [argument for argument in OrderedSet(node.all_input_nodes) if is_tensor(argument)]
    if not operands:
        return operations.leaf(node, shape_of(node))
    return elementwise.pointwise(node, [trace[o] for o in operands], shape_of(node))
