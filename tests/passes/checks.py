"""Checks of a rewritten graph: its results are right, and no tensor with a head axis and a key axis is left in it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from mla_compile.passes.outcome import Outcome
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import HIDDEN, Function, L, N, P, R, T

PATHS = ("absorbed", "chunked")
TERMS = HIDDEN + L + P + R + T
"""How many products are summed, one sum after the other, on the way from an input to the output."""
SCORE = 8.0
"""No score of these tests is larger, where nothing else is said."""


def check_right(before: Tensor, after: Tensor, score: float = SCORE) -> None:
    """Assert that two float64 results differ by no more than the order of their sums explains.

    Each of the `TERMS` additions may round, on both sides. A rounding error of a score of up to `score` is up to that
    many times as large, relatively, in its exponential.
    """
    bound = 2 * TERMS * score * torch.finfo(torch.float64).eps * before.nan_to_num().abs().max()
    torch.testing.assert_close(after, before, rtol=0, atol=float(bound), equal_nan=True)


def unfolded(module: fx.GraphModule) -> list[fx.Node]:
    """The tensors of a graph that have a head axis and a key axis, by their number of elements (see `spellings`)."""
    tensors = [node for node in module.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    return [node for node in tensors if (count := elements(node.meta["val"])) and count % (N * T) == 0]


def elements(value: Tensor) -> int:
    """How many elements a tensor has; at the sizes that it was traced with, if there are symbols among them."""
    return math.prod(int(size) if isinstance(size, int) else size.node.hint for size in value.shape)


def compiled(
    function: Function,
    tensors: Sequence[Tensor],
    symbolic: Sequence[Sequence[int]] = (),
    paths: Sequence[str] = PATHS,
) -> Iterator[tuple[str, fx.GraphModule, list[Outcome]]]:
    """For each path, the graph of `function` after the passes, its results compared with those from before."""
    return on_paths(capture(function, *tensors, symbolic=symbolic), tensors, paths)


def on_paths(
    traced: fx.GraphModule, tensors: Sequence[Tensor], paths: Sequence[str] = PATHS
) -> Iterator[tuple[str, fx.GraphModule, list[Outcome]]]:
    """For each path, a copy of a graph after the passes, its results compared with those from before."""
    before = run(traced, *tensors)
    for path in paths:
        module = fx.GraphModule(traced, copy.deepcopy(traced.graph))
        outcomes = rewrite(module, path)
        check_right(before, run(module, *tensors))
        yield path, module, outcomes


def check_rewritten(function: Function, tensors: Sequence[Tensor], symbolic: Sequence[Sequence[int]] = ()) -> None:
    """Assert that each path is taken, that the result is right, and that no tensor of heads and keys is left."""
    for path, module, outcomes in compiled(function, tensors, symbolic):
        assert [(o.path, o.reason) for o in outcomes] == [(path, "asked for by mla.path")]
        assert not unfolded(module)


def check_unchanged(function: Function, tensors: Sequence[Tensor]) -> None:
    """Assert that nothing is rewritten, not even the code of the graph, and that its results are the same."""
    module = capture(function, *tensors)
    before, code = run(module, *tensors), module.code
    outcomes = rewrite(module)
    assert not any(outcome.rewritten for outcome in outcomes)
    assert module.code == code
    check_right(before, run(module, *tensors))
