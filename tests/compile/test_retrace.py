"""The second trace: what it does not run comes out as if it had been run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mla_compile.retrace import calls_of, retrace
from tests.passes import spellings as mla
from tests.passes.graphs import capture, rewrite


def described(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Every node with its arguments, and of its result the sizes, strides, dtype and whose memory it is."""
    places = {node: i for i, node in enumerate(graph.nodes)}
    memory: dict[int, int] = {}
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            owner = memory.setdefault(value.untyped_storage()._cdata, len(memory))
            sizes = [str(size) for size in (*value.shape, *value.stride(), value.storage_offset())]
            value = value.dtype, sizes, owner
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: f"#{places[n]}")
        target = "" if node.op == "get_attr" else node.target
        lines.append((node.op, target, str(arguments), str(value), str(node.meta.get("original_aten"))))
    return lines


def scaled(*tensors: Tensor) -> Tensor:
    return mla.sealed(*mla.naive(*tensors)) * 2 + 1


def read_in_views(*tensors: Tensor) -> tuple[Tensor, ...]:
    out = mla.combined(*tensors).transpose(1, 2)
    return out.flatten(2).tanh(), out.unsqueeze(0)[..., 1:], torch.nn.functional.silu(tensors[0]).softmax(-1)


def with_numbers(*tensors: Tensor) -> Tensor:
    return mla.combined(*tensors) * torch.tensor([2.0, 3.0])[1] + torch.arange(3).sum()


def twice(*tensors: Tensor) -> Tensor:
    x, *rest = tensors
    return mla.combined(x + mla.combined(*tensors).sum(), *rest)


FUNCTIONS = [
    mla.combined,
    mla.transposed_output,
    mla.grown_cache,
    mla.buffer_cache,
    scaled,
    read_in_views,
    with_numbers,
    twice,
]


@pytest.mark.parametrize("symbolic", [(), [(0, 1), (0, 1), (0, 1)]], ids=["known", "symbolic"])
@pytest.mark.parametrize("path", ["absorbed", "chunked"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_graph_is_that_of_a_trace_that_runs_all(function: Callable[..., Any], path: str, symbolic: Any) -> None:
    module = capture(function, *mla.tensors(), symbolic=symbolic)
    before = calls_of(module.graph)
    assert all(outcome.rewritten for outcome in rewrite(module, path))
    quick, thorough = retrace(module, before), retrace(module, {})
    assert described(quick.graph) == described(thorough.graph)


def test_other_strides_than_before_go_all_the_way() -> None:
    """Those of what has taken a result's place, and of what is computed of it."""
    module = capture(lambda x: (x.sin() * 2 + 1).cos(), torch.randn(3, 4))
    before = calls_of(module.graph)
    sin = next(node for node in module.graph.nodes if node.target is torch.ops.aten.sin.default)
    by_columns = capture(lambda x: x.t().clone(memory_format=torch.contiguous_format).sin().t(), torch.randn(3, 4))
    with module.graph.inserting_before(sin):
        copies: dict[fx.Node, Any] = dict(zip(by_columns.graph.find_nodes(op="placeholder"), sin.args, strict=True))
        other = module.graph.graph_copy(by_columns.graph, copies)
    assert isinstance(other, fx.Node)
    sin.replace_all_uses_with(other)
    module.graph.erase_node(sin)
    quick, thorough = retrace(module, before), retrace(module, {})
    assert described(quick.graph) == described(thorough.graph)
    assert quick.graph.output_node().all_input_nodes[0].meta["val"].stride() == (1, 3)


def test_what_the_passes_left_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: fx.Interpreter, target: Any, *arguments: Any) -> Any:
        ran.append(target)
        return call_function(self, target, *arguments)

    call_function = fx.Interpreter.call_function
    monkeypatch.setattr(fx.Interpreter, "call_function", run)
    aten = torch.ops.aten
    for known, expected in ((True, 0), (False, 40)):
        module = capture(many_sines, *mla.tensors())
        before = calls_of(module.graph)
        rewrite(module)
        ran = list[Any]()
        retrace(module, before if known else {})
        assert ran.count(aten.sin.default) == expected


def many_sines(x: Tensor, *rest: Tensor) -> Tensor:
    for _ in range(40):
        x = x.sin()
    return mla.combined(x, *rest)
