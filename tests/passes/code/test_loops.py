"""The graphs of a loop over heads get every symbol in the sizes of their tensors as an input."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.passes.code.loops import over_groups, untold_by

N = 4


def looped(q: Tensor, k: Tensor) -> Tensor:
    return over_groups(lambda parts: (parts[0] @ parts[1].mT).softmax(-1) @ parts[1], [q, k], [1, 1], 2, q * 0)


def attention(q: Tensor, past: Tensor) -> Tensor:
    """With `t` tokens in the cache and `s` new ones, there are 2 t + s - 1 keys."""
    return looped(q, torch.cat([past, q, past[:, :, 1:]], 2))


def test_each_graph_of_a_loop_is_told_every_symbol() -> None:
    tensors = [torch.randn(2, N, tokens, 8, dtype=torch.float64) for tokens in (3, 5)]
    module = make_fx(attention, tracing_mode="symbolic")(*tensors)
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule) and part is not module]
    assert len(graphs) == 2
    for graph in graphs:
        values = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        sizes = [size for value in values for size in (value.shape if isinstance(value, Tensor) else (value,))]
        known = {size.node.expr for size in sizes if isinstance(size, torch.SymInt)}
        assert {symbol for expression in known for symbol in expression.free_symbols} <= known
        assert any(not expression.is_Symbol for expression in known)
    torch.testing.assert_close(module(*tensors), attention(*tensors))


def test_what_no_size_tells_is_known() -> None:
    """`untold_by` names the symbols within the sizes of some tensors that these sizes do not determine."""
    untold = []

    def attention(past: Tensor, new: Tensor) -> Tensor:
        both = torch.cat([past, new], 1)
        untold.extend([untold_by([both]), untold_by([both, new]), untold_by([both, past, new])])
        return both

    make_fx(attention, tracing_mode="symbolic")(torch.randn(2, 5), torch.randn(2, 7))
    assert [len(symbols) for symbols in untold] == [2, 0, 0]
