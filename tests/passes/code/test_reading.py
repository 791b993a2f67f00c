"""Code that reads; sizes that it computes from those of the tensors at hand, even if none has a symbol as a size."""

from __future__ import annotations

import pytest
import torch
from torch import SymInt, Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mla_compile.passes.algebra.made import joined
from mla_compile.passes.algebra.operations import read_of
from mla_compile.passes.algebra.sizes import Unaligned
from mla_compile.passes.algebra.terms import Axis
from mla_compile.passes.code.reading import Reader, realizer, tellers


@pytest.fixture
def sizes() -> tuple[SymInt, SymInt]:
    """Two unrelated symbolic sizes, 3 and 4 at present."""
    a, b = tensor_of_unknown_sizes().shape
    return a, b


def tensor_of_unknown_sizes() -> Tensor:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    return mode.from_tensor(torch.zeros(3, 4), symbolic_context=context)


@pytest.mark.parametrize(
    "told",
    [
        lambda a, b: (a, b),
        lambda a, b: (a, a + b),
        lambda a, b: (a + b, b),
        lambda a, b: (a, 2 * a + 3 * b + 1),
        lambda a, b: (a * b, 2 * b, a + b),
    ],
)
def test_sizes_from_sums(sizes, told) -> None:
    a, b = sizes
    realize = realizer(told(a, b))
    for wanted in (a, b, a + b, 3 * a + 1):
        assert int(realize(wanted.node.expr)) == int(wanted)


def test_sizes_that_are_no_polynomial(sizes) -> None:
    a, b = sizes
    realize = realizer((a, b))
    for wanted in (torch.sym_max(0, a - 7), torch.sym_min(a, b) + 1, a // 2 * b, a % 2):
        assert int(realize(wanted.node.expr)) == int(wanted)


def test_a_size_to_which_guards_left_one_value() -> None:
    tensor = tensor_of_unknown_sizes()
    symbol = tensor.shape[0].node.expr
    assert tensor.shape[0] <= 3
    assert tensor.shape[0] >= 3
    assert int(realizer([tensor])(symbol)) == 3
    graph = fx.Graph()
    graph.placeholder("x").meta["val"] = tensor
    assert tellers(graph.output(None), {symbol}) == []


def test_a_size_in_whose_place_torch_writes_another_since_a_guard() -> None:
    """As the guards do that rewriting an earlier site adds."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    tensors = [mode.from_tensor(torch.zeros(5), symbolic_context=context) for _ in range(2)]
    symbols = [tensor.shape[0].node.expr for tensor in tensors]
    assert tensors[0].shape[0] == tensors[1].shape[0]
    assert [tensor.shape[0].node.expr for tensor in tensors] in ([symbols[0]] * 2, [symbols[1]] * 2)
    graph = fx.Graph()
    graph.placeholder("x").meta["val"] = tensors[0]
    node = graph.output(None)
    for symbol in symbols:
        assert [teller.name for teller in tellers(node, {symbol})] == ["x"]
        assert realizer([tensors[0]])(2 * symbol).node.expr == 2 * tensors[0].shape[0].node.expr


def test_sizes_that_nothing_tells(sizes) -> None:
    a, b = sizes
    with pytest.raises(Unaligned, match="no tensor at hand tells the size"):
        realizer((a + b, a * b))(a.node.expr)


def graph_of(*values: SymInt) -> fx.Node:
    """A node after placeholders with these values."""
    graph = fx.Graph()
    for i, value in enumerate(values):
        graph.placeholder(f"size{i}").meta["val"] = value
    return graph.output(None)


def test_tellers_are_as_few_as_it_takes(sizes) -> None:
    a, b = sizes
    symbols = a.node.expr.free_symbols | b.node.expr.free_symbols
    node = graph_of(a * b, a + b, a, b, 2 * a)
    assert [teller.name for teller in tellers(node, b.node.expr.free_symbols)] == ["size3"]
    node = graph_of(a * b, a + b, a, 2 * a)
    assert {teller.name for teller in tellers(node, symbols)} == {"size1", "size2"}


def test_tellers_of_a_size_that_nothing_tells(sizes) -> None:
    a, b = sizes
    with pytest.raises(Unaligned, match="nothing in the graph tells the sizes"):
        tellers(graph_of(a + b, a * b), a.node.expr.free_symbols)


@pytest.mark.parametrize("broadcast", [True, False])
def test_what_repeats_beside_what_differs(broadcast: bool) -> None:
    """Of two tensors that are joined, one may lack an axis of the other."""
    rows, place, own, other = Axis(3), Axis(6), Axis(2), Axis(4)
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    reads = read_of(first, [(own,)]).read, read_of(second, [(rows,), (other,)]).read
    both = joined(*reads, ((own,), (other,)), place)
    assert both is not None
    tensors = torch.randn(2), torch.randn(3, 4)
    read = Reader([first, second], tensors)
    expected = torch.cat([tensors[0].expand(3, 2), tensors[1]], 1)
    assert torch.equal(read(both, (rows,), (place,), broadcast=broadcast), expected)
