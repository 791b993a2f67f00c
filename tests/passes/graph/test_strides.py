"""Strides of rewritten outputs stay where something would see that they change; nothing is added elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_compile.passes.nodes.arguments import aten
from tests.passes import spellings as mla
from tests.passes.graphs import capture, rewrite
from tests.passes.spellings import SCALE, SQ, B, N

V = mla.V - 2
"""Values narrower than keys: torch attends by the equation then, and lays the output out by heads, then queries."""


def attend(*inputs: Tensor) -> Tensor:
    q, k, v = mla.naive(*inputs)
    return mla.sealed(q, k, v[..., :V])


def weights(*inputs: Tensor) -> Tensor:
    q, k, _ = mla.naive(*inputs)
    return (q @ k.mT * SCALE).tanh().softmax(-1)


@torch.library.custom_op("test_strides::rows", mutates_args=())
def rows(o: Tensor) -> Tensor:
    """What a user's kernel does that takes its input to be contiguous."""
    return o.view(-1, o.shape[-1]).clone()


rows.register_fake(lambda o: o.new_empty(o.numel() // o.shape[-1], o.shape[-1]))

SEEN = {
    "returned": lambda *inputs: attend(*inputs),
    "returned transposed, and scaled": lambda *inputs: 2 * attend(*inputs).transpose(1, 2),
    "as_strided": lambda *inputs: attend(*inputs).as_strided((B * N * SQ, V), (V, 1)),
    "as_strided of a clone": lambda *inputs: (attend(*inputs) * 2).clone().as_strided((2, 3), (7, 2)),
    "as_strided of a sum over heads": lambda *inputs: attend(*inputs).transpose(0, 2).sum(1).as_strided((9,), (1,)),
    "an op of the user's": lambda *inputs: rows(attend(*inputs)),
    "weights": lambda *inputs: (weights(*inputs) @ mla.naive(*inputs)[2], weights(*inputs)),
}
UNSEEN = {
    "one row of all heads": lambda *inputs: attend(*inputs).transpose(1, 2).reshape(B, SQ, N * V),
    "a copy": lambda *inputs: attend(*inputs).transpose(1, 2).contiguous(),
    "a product": lambda *inputs: attend(*inputs) @ torch.ones(V, V, dtype=torch.float64),
    "a sum of all": lambda *inputs: attend(*inputs).sum(),
}


@pytest.mark.parametrize("symbolic", [False, True], ids=["sizes", "symbols"])
@pytest.mark.parametrize("path", ["absorbed", "chunked"])
@pytest.mark.parametrize("name", SEEN)
def test_strides_that_are_seen_stay(name, path, symbolic):
    inputs = mla.tensors()
    module = capture(SEEN[name], *inputs, symbolic=[(), (1,), (1,)] if symbolic else ())
    assert all(outcome.rewritten for outcome in rewrite(module, path))
    for new, old in zip(*map(torch.utils._pytree.tree_leaves, (module(*inputs), SEEN[name](*inputs))), strict=True):
        assert new.stride() == old.stride()
        torch.testing.assert_close(new, old)


@pytest.mark.parametrize("name", UNSEEN)
def test_no_copy_is_added_where_none_sees_them(name):
    inputs = mla.tensors()
    module = capture(UNSEEN[name], *inputs)
    copies = len(module.graph.find_nodes(op="call_function", target=aten.clone.default))
    assert all(outcome.rewritten for outcome in rewrite(module))
    after = module.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert len([node for node in after if node.meta["val"].shape[-1] in (V, N * V)]) <= copies
    new, old = module(*inputs), UNSEEN[name](*inputs)
    assert new.stride() == old.stride()
    torch.testing.assert_close(new, old)
