"""A loop gets the tensor itself in place of a chain of views that ends with the layout that it began with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.export import Dim

import mla_compile
from mla_compile.inductor.loop_operands import straighten_loop_operands
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, Combined, L, R

pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")
while_loop = torch.ops.higher_order.while_loop


def loop(*operands: Tensor) -> tuple[Tensor, ...]:
    """Two turns, each of which adds up the operands, matrices of three rows."""

    def turn(start: Tensor, total: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
        return start + 1, total + sum(row.sum(dtype=torch.float32) for row in rows)

    start, total = torch.zeros((), dtype=torch.int64), torch.zeros(())
    return while_loop(lambda start, *_: start < 2, turn, (start, total), operands)


def operands_of(function: Callable[..., object], *arguments: Tensor) -> list[str]:
    """The inputs that a loop of the program gets, or the targets of its other operands, once they are straightened."""
    (node,) = straightened(function, *arguments).graph.find_nodes(op="call_function", target=while_loop)
    return [operand.name if operand.op == "placeholder" else str(operand.target) for operand in node.args[3]]


def straightened(function: Callable[..., object], *arguments: Tensor) -> fx.GraphModule:
    class Module(torch.nn.Module):
        def forward(self, *given: Tensor) -> object:
            return function(*given)

    module = torch.export.export(Module(), arguments).run_decompositions({}).graph_module
    straighten_loop_operands(module)
    module.graph.lint()
    return module


def test_views_that_end_where_they_began() -> None:
    x = torch.randn(1, 3, 4)
    assert operands_of(lambda x: loop(x.squeeze(0).unsqueeze(0)), x) == ["given_0"]
    assert operands_of(lambda x: loop((x * 2).mT.mT), x) == ["aten.mul.Tensor"]


def test_views_that_end_elsewhere_stay() -> None:
    x = torch.randn(1, 3, 3)
    assert operands_of(lambda x: loop(x.squeeze(0)), x) == ["aten.squeeze.dim"]
    assert operands_of(lambda x: loop(x.mT), x) == ["aten.transpose.int"]
    assert operands_of(lambda x: loop(x[:, 1:][:, :1]), x) == ["aten.slice.Tensor"]


def test_views_of_another_dtype_are_taken_inside() -> None:
    x = torch.randint(100, (2, 3, 4), dtype=torch.uint8)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return loop(x.view(torch.int8) + 0.0, x.view(torch.int8))

    assert operands_of(function, x)[1] == "given_0"
    (_, total), (_, expected) = straightened(function, x)(x), function(x)
    assert total == expected == 4 * x.sum()


def test_copies_that_inductor_leaves_out() -> None:
    x = torch.randn(1, 3, 4)
    assert operands_of(lambda x: loop(x.squeeze(0).clone().unsqueeze(0)), x) == ["given_0"]
    assert operands_of(lambda x: loop(x, x.clone()), x) == ["given_0", "aten.clone.default"]


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "the first two of four heads, each twice": lambda x: x[:2].unsqueeze(1).expand(-1, 2, -1, -1).reshape(4, 3, 3),
    "rows and columns in exchange": lambda x: x.mT.contiguous(),
    "rounded on the way": lambda x: x.bfloat16().float(),
    "other elements of the same layout": lambda x: x.flip(0).squeeze(1),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_copies_with_the_layout_but_not_the_elements_stay(change: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 3, 3)
    assert change(x).shape == x.shape
    assert operands_of(lambda x: loop(change(x)), x) != ["given_0"]
    result, expected = straightened(lambda x: loop(change(x)[1]), x)(x), loop(change(x)[1])
    assert torch.equal(result[1], expected[1])


def test_query_heads_that_share_keys_are_lowered_right() -> None:
    """A weight of all keys before all values has as many rows as the keys of all query heads."""

    class Shared(torch.nn.Module):
        def forward(self, q: Tensor, latent: Tensor, weight: Tensor) -> Tensor:
            k, v = (t.unflatten(2, (2, 8)).transpose(1, 2) for t in (latent @ weight.mT).chunk(2, -1))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    given = torch.randn(2, 4, 6, 8), torch.randn(2, 24, 10), torch.randn(32, 10)
    program = torch.export.export(Shared(), given)
    program = mla_compile.lower(mla_compile.rewrite(program, options={"mla.path": "chunked", "mla.strict": True}))
    exact = Shared()(*(t.double() for t in given))
    assert_as_close_as_eager(program.module()(*given), Shared()(*given), exact)


def test_a_lowered_program_of_one_sequence() -> None:
    dims = Dim("Sq", min=1, max=64), Dim("T", min=0, max=100)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Combined()

        def forward(self, x: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
            return self.attention(x, (latent, k_rope))[0]

    example = torch.randn(1, 3, HIDDEN), torch.randn(1, 7, L), torch.randn(1, 7, R)
    program = torch.export.export(Step().eval(), example, dynamic_shapes=({1: dims[0]}, {1: dims[1]}, {1: dims[1]}))
    program = mla_compile.lower(mla_compile.rewrite(program, options={"mla.path": "chunked", "mla.strict": True}))
    (node,) = program.graph.find_nodes(op="call_function", target=while_loop)
    tensors = [n for n in node.args[3] if isinstance(n, fx.Node) and isinstance(n.meta["val"], Tensor)]
    assert len(tensors) >= 5
    for operand in tensors:
        origin = operand
        while "squeeze" in str(origin.target):
            (origin,) = origin.all_input_nodes
            assert origin.meta["val"].shape != operand.meta["val"].shape, f"{operand} is {origin}"
