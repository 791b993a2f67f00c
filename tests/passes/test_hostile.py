"""Random and truncated graphs: the passes neither fail nor change a result, and their work is linear in the graph."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from mla_compile.passes.attention.find import find
from mla_compile.passes.trace.trace import Trace
from tests.drawn import UNHURRIED
from tests.passes import spellings as mla
from tests.passes.checks import check_right
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SPELLINGS, SQ, B, L, P, R, T, V

STEPS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "softmax": lambda x, y, n: x.softmax(n % x.dim()),
    "scores": lambda x, y, n: x @ y.mT if x.shape[-1] == y.shape[-1] else x @ x.mT,
    "values": lambda x, y, n: x @ y if x.shape[-1] == y.shape[-2] else x @ x.mT @ x,
    "attention": lambda x, y, n: mla.sealed(x, x, x, causal=bool(n % 2)),
    "transpose": lambda x, y, n: x.transpose(n % 3, (n + 1) % 3),
    "merge": lambda x, y, n: x.reshape(1, -1, x.shape[-1]),
    "slice": lambda x, y, n: x[..., : max(n, 1)],
    "join": lambda x, y, n: torch.cat([x, x.neg()], n % 3),
    "pad": lambda x, y, n: torch.nn.functional.pad(x, (n % 3, 1)),
    "bias": lambda x, y, n: x + x[..., :1, :] * n,
    "scale": lambda x, y, n: x * (n - 1),
    "cap": lambda x, y, n: x.tanh(),
    "mask": lambda x, y, n: x.masked_fill(x > 1, -9.0),
    "masked": lambda x, y, n: x.masked_fill(torch.ones(x.shape[1:]).tril(n) == 0, float("-inf")).softmax(-1),
    "exp": lambda x, y, n: (x - x.amax(-1, keepdim=True)).exp(),
    "divide": lambda x, y, n: x / x.sum(n % 3, keepdim=bool(n % 2) or x.dim() < 4),
}


@settings(UNHURRIED, max_examples=25, derandomize=True)
@given(steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 5)), min_size=1, max_size=9))
def test_any_graph_keeps_its_numbers(steps: list[tuple[str, int]]) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        for name, n in steps:
            following = STEPS[name](x, y, n)
            if following.dim() != 3 or not 0 < following.numel() <= 600:
                continue
            x, y = following, x
        return x

    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    module = capture(program, *tensors)
    before = run(module, *tensors)
    for path in ("absorbed", "chunked"):
        changed = fx.GraphModule(module, copy.deepcopy(module.graph))
        rewrite(changed, path)
        after = run(changed, *tensors)
        both = before.isfinite() & after.isfinite()
        assert torch.equal(before.isfinite(), after.isfinite())
        check_right(before.where(both, 0), after.where(both, 0))


@settings(UNHURRIED, max_examples=10, derandomize=True)
@given(name=st.sampled_from(sorted(SPELLINGS)), end=st.integers(1, 80), symbolic=st.booleans())
def test_a_truncated_attention_keeps_its_numbers(name: str, end: int, symbolic: bool) -> None:
    """Cut the graph of a spelling after some node; every tensor without users becomes a result."""
    tensors = mla.tensors()
    module = capture(SPELLINGS[name], *tensors, symbolic=mla.UNKNOWN if symbolic else ())
    *nodes, output = list(module.graph.nodes)
    for node in nodes[:4:-1]:
        if nodes.index(node) >= max(end, 6):
            output.args = (None,)
            module.graph.erase_node(node)
    kept = [n for n in module.graph.nodes if n.op == "call_function" and not n.users and _is_tensor(n)]
    output.args = (tuple(kept),)
    module.recompile()
    before = run(module, *tensors)
    for path in ("absorbed", "chunked"):
        changed = fx.GraphModule(module, copy.deepcopy(module.graph))
        rewrite(changed, path)
        for old, new in zip(before, run(changed, *tensors), strict=True):
            check_right(old, new)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor) and "empty" not in str(node.target)


def layers(count: int) -> fx.GraphModule:
    """A residual stream through `count` layers: attention with a latent of its own, and a feed-forward."""

    def model(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        for _ in range(count):
            new = torch.cat([latent[:, SQ:], x[..., :L]], 1)
            o = mla.combined_sdpa(x, new, torch.cat([k_rope[:, SQ:], x[..., :R]], 1), w_q, w_kv)
            x = x + o.transpose(1, 2).flatten(2)[..., : x.shape[-1]]
            x = x + (x @ w_q[:, : x.shape[-1]]).relu() @ w_q[:, : x.shape[-1]].mT
        return x

    return capture(model, *mla.tensors())


def _calls(count: int) -> int:
    """How many Python calls the analysis of `count` layers takes: unlike seconds, other processes do not change it."""
    module, calls = layers(count), 0

    def counting(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(counting)
    try:
        found = list(find(module.graph, Trace(module.graph)))
    finally:
        sys.setprofile(None)
    assert len(found) == count
    return calls


def test_analysis_is_linear_in_the_graph() -> None:
    few, many = _calls(8), _calls(61)
    assert many <= 61 / 8 * few * 1.1
    # At a microsecond per call, 3 s for 61 layers; today's interpreters take less than that.
    assert many <= 3_000_000


@pytest.mark.parametrize("size", [B, P, V, T])
def test_a_graph_without_attention(size: int) -> None:
    assert rewrite(capture(lambda x: (x @ x.mT).exp(), torch.ones(size, size))) == []
