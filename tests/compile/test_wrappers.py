"""Decorators that several functions share: a graph that breaks below them does not use up torch's variants of them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import mla_compile
from tests.models import HIDDEN, Combined

pytestmark = pytest.mark.usefixtures("without_codegen")
LENGTHS = (3, 1, 1, 4, 1)


def shared(function):
    """As transformers' decorators do: looks at the arguments and passes them on."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        if "old" in kwargs:
            kwargs["new"] = kwargs.pop("old")
        return function(*args, **kwargs)

    return wrapped


class Attention(Combined):
    @shared
    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return super().forward(x, cache)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    @shared
    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, cache = self.attention(x, cache)
        torch._dynamo.graph_break()  # as in experts that are called one by one
        return x + self.scale * out, cache


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    @shared
    def forward(self, x: Tensor, caches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        grown = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, cache)
            grown.append(cache)
        return x, grown


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    @shared
    def forward(self, x: Tensor, caches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        return self.model(x, caches)


def compiled_calls() -> list[int]:
    """How many attentions of each call ran compiled."""
    ran: list[mla_compile.Report] = []

    def backend(graph, inputs):
        compiled = mla_compile.backend.mla(graph, inputs)
        report = mla_compile.last_report()

        def run(*arguments):
            ran.append(report)
            return compiled(*arguments)

        return run

    model, counts = Whole(), []
    compiled = torch.compile(model, backend=backend)
    caches = of_compiled = [Combined.empty_cache(2), Combined.empty_cache(2)]
    with torch._dynamo.config.patch(recompile_limit=5):
        for length in LENGTHS:
            x = torch.randn(2, length, HIDDEN)
            expected, caches = model(x, caches)
            out, of_compiled = compiled(x, of_compiled)
            torch.testing.assert_close(out, expected)
            counts.append(sum(report.rewritten for report in ran))
            ran.clear()
    return counts


def test_all_attentions_stay_compiled():
    assert compiled_calls() == [2] * len(LENGTHS)


def test_otherwise_torch_stops(monkeypatch):
    """If this fails, torch no longer counts so, and the module under test can go."""
    monkeypatch.setattr(mla_compile.backend, "pass_over_shared_wrappers", lambda: None)
    assert compiled_calls()[-1] < 2


def test_a_wrapper_of_one_function_is_left_alone(monkeypatch):
    passed_over = []
    monkeypatch.setattr("mla_compile.dynamo.wrappers.skip_code", passed_over.append)

    @shared
    def outer(x, cache):
        out, _ = attention(x, cache)
        torch._dynamo.graph_break()
        return out

    attention = Combined()
    torch.compile(outer, backend="mla")(torch.randn(2, 3, HIDDEN), Combined.empty_cache(2))
    assert mla_compile.last_report().rewritten == 1
    assert passed_over == []
