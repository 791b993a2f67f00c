"""Many queries under a function of the scores, such as a soft cap: a group of heads at a time, never all scores."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import mla_compile
from mla_compile.passes.paths import by_heads
from tests.errors import assert_as_close_as_eager
from tests.passes import spellings as mla
from tests.passes.checks import check_right
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SCALE, SQ, UNKNOWN, Function, N, P, T, V


def seen(blind: bool = False) -> Tensor:
    """Bool `[Sq, T]`, causal; the second query sees no key at all if it is `blind`."""
    return torch.ones(SQ, T, dtype=torch.bool).tril(T - SQ) & ((torch.arange(SQ) != 1)[:, None] | (not blind))


def capped(s: Tensor) -> Tensor:
    return 3 * torch.tanh(s / 3)


def attention(weights: Function) -> Function:
    """MLA whose attention weights are a function of the scaled scores, `[B, N, Sq, T]`."""

    def function(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return weights((q @ k.transpose(-1, -2)) * SCALE) @ v

    return function


def in_two(*args: Tensor) -> Tensor:
    """A function of the sum of two products, one of which is used a second time."""
    q, k, v = mla.naive(*args)
    nope, rope = q[..., :P] @ k[..., :P].mT * SCALE, q[..., P:] @ k[..., P:].mT * SCALE
    return (capped(nope + rope) + 0.1 * rope.abs()).softmax(-1) @ v


def with_sink(s: Tensor) -> Tensor:
    sink = torch.linspace(-1, 1, N).double()[:, None, None].expand(s.shape[0], N, s.shape[2], 1)
    return torch.cat([capped(s), sink], -1).softmax(-1)[..., :-1]


def by_hand(s: Tensor) -> Tensor:
    s = capped(s)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def with_scaled_values(*args: Tensor) -> Tensor:
    q, k, v = mla.naive(*args)
    return capped((q @ k.transpose(-1, -2)) * SCALE).softmax(-1) @ (v * 0.5 + torch.arange(V).double())


def with_temperature(bias: float | None) -> Function:
    """A number of each query, which is a product too, perhaps with a bias, divides what a mask has hidden before."""

    def function(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        added = None if bias is None else torch.full((1,), bias).double()
        temperature = F.linear(args[0], args[3][:, :1].T, added).exp()[:, None]
        return ((q @ k.mT * SCALE).masked_fill(~seen(), -math.inf) / temperature).softmax(-1) @ v

    return function


FUNCTIONS: dict[str, Function] = {
    "a soft cap": attention(lambda s: capped(s).softmax(-1)),
    "under a causal mask": attention(lambda s: capped(s).masked_fill(~seen(), -math.inf).softmax(-1)),
    "and a row that sees nothing": attention(lambda s: capped(s).masked_fill(~seen(blind=True), -math.inf).softmax(-1)),
    "a finite fill there": attention(lambda s: capped(s).masked_fill(~seen(blind=True), -1e30).softmax(-1)),
    "a bias a head after": attention(lambda s: (capped(s) + torch.arange(N)[:, None, None]).softmax(-1)),
    "a cap a head": attention(lambda s: (s / (torch.arange(N) + 1.0)[:, None, None]).tanh().softmax(-1)),
    "a number of no dimension": attention(lambda s: (s * torch.full((), 2.0)).tanh().softmax(-1)),
    "what is below 0 left out": attention(lambda s: torch.where(s > 0, s, torch.zeros_like(s)).softmax(-1)),
    "a power of 2": attention(lambda s: capped(s).exp2() / capped(s).exp2().sum(-1, keepdim=True)),
    "a softmax by hand": attention(by_hand),
    "two products": in_two,
    "a temperature": with_temperature(None),
    "a temperature with a bias": with_temperature(0.5),
    "scaled values": with_scaled_values,
    "a sink": attention(with_sink),
    "no number, so 0": attention(
        lambda s: capped(s).masked_fill(~seen(blind=True), -math.inf).softmax(-1).nan_to_num()
    ),
    "as many as there are scores, in a triangle": attention(
        lambda s: capped(s).masked_fill(torch.ones_like(s, dtype=torch.bool).triu(T - SQ + 1), -math.inf).softmax(-1)
    ),
    "safe": attention(lambda s: torch.ops.aten._safe_softmax(capped(s).masked_fill(~seen(blind=True), -math.inf), -1)),
}


def tensors_of(module: fx.GraphModule) -> list[Tensor]:
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    values = [node.meta.get("val") for graph in graphs for node in graph.nodes]
    return [value for value in values if isinstance(value, Tensor)]


@pytest.mark.diagonal
@pytest.mark.parametrize("one_head", [False, True], ids=["all heads at once", "one head at a time"])
@pytest.mark.parametrize("symbolic", [(), UNKNOWN], ids=["known", "unknown"])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_of_scores_is_taken_by_heads(
    function: Function, symbolic: Sequence[Sequence[int]], one_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if function is FUNCTIONS["a sink"] and symbolic:
        pytest.skip("this tracer asks the weights for their size")
    monkeypatch.setattr(by_heads, "SCORES_BYTES", 1 if one_head else 1 << 28)
    tensors = mla.tensors()
    module = capture(function, *tensors, symbolic=symbolic)
    before = run(module, *tensors)
    (outcome,) = rewrite(module, "chunked")
    assert outcome.path == "chunked", outcome.reason
    check_right(before, run(module, *tensors))
    if one_head and not symbolic and function is not FUNCTIONS["as many as there are scores, in a triangle"]:
        sizes = [value.shape.numel() for value in tensors_of(module)]
        assert not [size for size in sizes if size % (N * T) == 0], "a tensor of all heads and keys"


def test_the_cost_model_takes_it_and_says_so() -> None:
    tensors = mla.tensors(batch=1, queries=64)
    (outcome,) = rewrite(capture(FUNCTIONS["a soft cap"], *tensors), "auto", workspace_tokens=1024)
    assert outcome.path == "chunked"
    assert outcome.reason.startswith(by_heads.ByHeads.why)


def reread(*args: Tensor) -> Tensor:
    q, k, v = mla.naive(*args)
    weights = (capped(q @ k.mT) * SCALE).softmax(-1)
    return torch.cat([(weights @ v).flatten(), weights.flatten()])


def transposed(*args: Tensor) -> Tensor:
    """As many queries as keys, and a function of the scores and of their transpose."""
    x, latent, k_rope, *weights = args
    q, k, v = mla.naive(x[:, :1].expand(-1, T, -1) * torch.arange(T)[:, None], latent, k_rope, *weights)
    s = q @ k.mT
    return (s.mT.tanh() + s).softmax(-1) @ v


def divided_after(*args: Tensor) -> Tensor:
    q, k, v = mla.naive(*args)
    e = capped(q @ k.mT * SCALE).exp()
    return (e @ v) / e.sum(-1, keepdim=True)


NEAR_MISSES: dict[str, tuple[Function, str]] = {
    "a part of the greatest of a row": (
        attention(lambda s: (s / s.abs().amax(-1, keepdim=True)).softmax(-1)),
        "expected a function of each score by itself for many queries, found `amax",
    ),
    "sums of scores": (attention(lambda s: s.cumsum(-1).tanh().softmax(-1)), "expected scores that are a sum"),
    "scores less their mean": (
        attention(lambda s: (s - s.mean(-1, keepdim=True)).tanh().softmax(-1)),
        "expected a function of each score by itself for many queries, found `mean",
    ),
    "a softmax of a softmax": (
        attention(lambda s: s.softmax(-1).softmax(-1)),
        "expected scores that are a sum of products",
    ),
    "weights that are returned": (reread, "expected attention weights that only the product with the values reads"),
    "scores and their transpose": (transposed, "found scores that are used at other positions too"),
    "divided after the values": (divided_after, "divides only after"),
}


@pytest.mark.parametrize(("function", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_what_needs_other_scores_too_stays(function: Function, reason: str) -> None:
    tensors = mla.tensors()
    module = capture(function, *tensors)
    before, code = run(module, *tensors), module.code
    (outcome,) = rewrite(module, "chunked")
    assert (outcome.path, module.code) == ("unchanged", code)
    assert reason in outcome.reason
    check_right(before, run(module, *tensors))


class Capped(nn.Module):
    """A layer of MLA with a soft cap under a causal mask."""

    L, N, P, R, V = 24, 4, 12, 8, 16

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(32, self.N * (self.P + self.R), bias=False)
        self.kv_a = nn.Linear(32, self.L + self.R, bias=False)
        self.kv_b = nn.Linear(self.L, self.N * (self.P + self.V), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.N, -1)).transpose(1, 2)
        latent, k_rope = self.kv_a(x).split([self.L, self.R], -1)
        k, v = self.kv_b(latent).unflatten(-1, (self.N, -1)).transpose(1, 2).split([self.P, self.V], -1)
        k = torch.cat([k, k_rope[:, None].expand(-1, self.N, -1, -1)], -1)
        scores = 0.5 * torch.tanh(q @ k.mT / 0.5)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1, dtype=torch.float32).to(q.dtype)
        return (weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [
        (torch.float32, False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((torch.bfloat16, False), (torch.float32, True))),
    ],
    ids=str,
)
@pytest.mark.usefixtures("without_codegen")
def test_compiled_it_is_as_right_as_eager(dtype: torch.dtype, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiled(dtype, dynamic, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_code_that_inductor_makes_of_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled by Inductor, with symbolic lengths."""
    check_compiled(dtype, True, monkeypatch)


def check_compiled(dtype: torch.dtype, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_heads, "SCORES_BYTES", 4 * 2 * 40 * 40 * 2)  # two of four heads
    torch.manual_seed(0)
    model = Capped().to(dtype).requires_grad_(False)
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="mla", dynamic=dynamic, fullgraph=True)
    for tokens in (40, 33) if dynamic else (40,):
        x = torch.randn(2, tokens, 32).to(dtype)
        assert_as_close_as_eager(compiled(x), model(x), exact(x.double()))
        (site,) = mla_compile.last_report().sites
        assert (site.path, site.reason.startswith(by_heads.ByHeads.why)) == ("chunked", True)


def test_an_exported_program() -> None:
    torch.manual_seed(0)
    model = Capped().requires_grad_(False)
    x = torch.randn(2, 40, 32)
    program = torch.export.export(model, (x,), strict=False)
    lowered = mla_compile.lower(mla_compile.rewrite(program, options={"mla.path": "chunked"}))
    assert_as_close_as_eager(lowered.module()(x), model(x), copy.deepcopy(model).double()(x.double()))
