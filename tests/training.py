"""Gradients of a rewritten module, with no compiler after the passes: for tests of many graphs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

import mla_compile.kernels.register  # noqa: F401  registers what computes the ops
from mla_compile.cost import Device
from mla_compile.options import Options
from mla_compile.passes.outcome import Outcome
from mla_compile.training.rewrite import rewrite_for_training

FACTOR = 8.0
"""A gradient may be this many times further from float64 than eager's; derived in `tests/spellings/checks.py`."""
DEVICE = Device("of the tests", 1e12, 1e11)


class Rewritten:
    """A module whose Dynamo graphs are rewritten, then run by torch operation by operation."""

    def __init__(self, module: Any, **options: Any) -> None:
        self.outcomes: list[Outcome] = []
        self.notes: list[str] = []
        self.graphs: list[fx.GraphModule] = []

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            trained = rewrite_for_training(graph, DEVICE, Options(**options))
            self.outcomes += trained.outcomes
            self.notes += trained.notes
            self.graphs.append(trained.module)
            return trained.module.forward

        torch._dynamo.reset()
        self._compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def nodes(self, target: Any) -> list[fx.Node]:
        """All nodes that call a function in the rewritten graphs, checkpoints included."""
        graphs = [part.graph for graph in self.graphs for part in graph.modules() if isinstance(part, fx.GraphModule)]
        return [node for graph in graphs for node in graph.nodes if node.target is target]


def gradients(function: Any, module: nn.Module, inputs: Sequence[Any], *, seed: int = 1) -> list[Tensor]:
    """The first output, and the gradients of floating inputs and parameters for a random gradient of that output.

    Inputs are copied. Where autograd returns no gradient, zeros take its place.
    """
    with torch.enable_grad():
        given = [_leaf(value) for value in inputs]
        output = function(*(value.clone() if isinstance(value, Tensor) else value for value in given))
        output = output[0] if isinstance(output, tuple) else output
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        leaves = [leaf for leaf in (*given, *module.parameters()) if isinstance(leaf, Tensor) and leaf.requires_grad]
        found = torch.autograd.grad((output * direction.to(output.dtype)).sum(), leaves, allow_unused=True)
    return [output.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))]


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point())


def assert_gradients_close(
    found: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor], factor: float = FACTOR
) -> None:
    """Check results of `gradients` against float64: at most `factor` times as far from it as eager's.

    The unit of the error is at least one rounding of the largest of all numbers: where there is a single key, eager's
    gradients of the queries are differences of equal numbers, ours of nearly equal ones. Where eager or float64 gives
    no finite number, ours is not checked.
    """
    largest = max(float(truth.nan_to_num(0, 0, 0).abs().max()) for truth in exact if truth.numel())
    for ours, plain, truth in zip(found, eager, exact, strict=True):
        assert ours.dtype == plain.dtype
        assert ours.shape == plain.shape
        finite = plain.isfinite() & truth.isfinite()
        assert ours.isfinite()[finite].all()
        if not truth.numel():
            continue
        error, unit = (float((t.double() - truth).where(finite, 0).abs().max()) for t in (ours, plain))
        allowed = factor * max(unit, torch.finfo(plain.dtype).eps * largest)
        assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}, eager's {unit:.3g}"


def assert_gradients_of(function: Any, module: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Check the first output and all gradients of a function that computes what `module` does against float64."""
    wide = copy.deepcopy(module).double()
    exact = gradients(wide, wide, [x.double() for x in inputs])
    assert_gradients_close(gradients(function, module, inputs), gradients(module, module, inputs), exact)


def assert_every_gradient(module: nn.Module, inputs: Sequence[Tensor], *, autocast: bool = False) -> Rewritten:
    """Check the first output and all gradients of a rewritten module against float64; returns the rewritten module."""
    wide = copy.deepcopy(module).double()
    exact = gradients(wide, wide, [x.double() for x in inputs])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        eager = gradients(module, module, inputs)
        rewritten = Rewritten(module)
        found = gradients(rewritten, module, inputs)
    assert_gradients_close(found, eager, exact)
    return rewritten
