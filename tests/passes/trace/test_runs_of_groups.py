"""Tensors put together from heads, of which each group comes from its own tensor: no head is taken for another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from mla_compile.passes.algebra.terms import Read
from mla_compile.passes.trace.trace import Trace
from tests.passes import spellings as mla
from tests.passes.checks import compiled
from tests.passes.graphs import capture
from tests.passes.spellings import HIDDEN, N, P, R

HEADS, GROUP = 4, 2
JOINS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "stacked": lambda pieces: torch.stack(pieces, 1),
    "joined": lambda pieces: torch.cat([piece[:, None] for piece in pieces], 1),
}


def queries(x: Tensor, w_q: Tensor, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """The first two heads of one tensor, the others of another."""
    sources, weights = (x.tanh(), x.sigmoid()), w_q.view(HIDDEN, N, P + R)
    return join([sources[n // GROUP] @ weights[:, n] for n in range(HEADS)])


@pytest.mark.parametrize("join", JOINS.values(), ids=JOINS)
def test_each_head_of_queries_is_its_own(join: Callable[[list[Tensor]], Tensor]) -> None:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        _, k, v = mla.naive(x, latent, k_rope, w_q, w_kv)
        return mla.softmax(queries(x, w_q, join), k[:, :HEADS], v[:, :HEADS])

    for path, _, (outcome,) in compiled(attention, mla.tensors()):
        assert outcome.path == path


def _indices(node: fx.Node, trace: Trace) -> int:
    """How many heads the form of a node tells apart."""
    read = trace[node].term.read
    assert isinstance(read, Read)
    return max([1, *(int(digit.axis.size) for digit in read.dims[1] if digit.axis is not None)])


@pytest.mark.parametrize("join", JOINS.values(), ids=JOINS)
@pytest.mark.parametrize("attempt", range(8))
def test_no_group_repeats_another(join: Callable[[list[Tensor]], Tensor], attempt: int) -> None:
    """The order of axes in a set depends on their addresses, which `kept` changes from attempt to attempt."""
    kept = [object() for _ in range(attempt * 7)]
    x, _, _, w_q, _ = mla.tensors()
    graph = capture(lambda x, w_q: queries(x, w_q, join), x, w_q).graph
    trace = Trace(graph)
    (node,) = [
        node for node in graph.nodes if node.target in (torch.ops.aten.stack.default, torch.ops.aten.cat.default)
    ]
    assert _indices(node, trace) == HEADS
    assert len(kept) == attempt * 7
