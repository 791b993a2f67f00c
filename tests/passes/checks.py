"""What has to hold of a graph after the passes: it is right, and nothing of heads and keys is left in it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from mla_compile.passes.outcome import Outcome
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import HIDDEN, Function, L, N, P, R, T

TERMS = HIDDEN + L + P + R + T
"""Products summed one after the other on the way from an input to the output."""


def check_right(before: Tensor, after: Tensor) -> None:
    """Two orders of the same float64 sums: each of the `TERMS` additions may round, to both sides, in numbers that are
    at most e^2 times the largest result (the exponential of a score that was rounded at a magnitude of up to 8)."""
    bound = 2 * TERMS * 8 * torch.finfo(torch.float64).eps * before.nan_to_num().abs().max()
    torch.testing.assert_close(after, before, rtol=0, atol=float(bound), equal_nan=True)


def unfolded(module: fx.GraphModule) -> list[fx.Node]:
    """The tensors of a graph that have a head axis and a key axis."""
    tensors = [node for node in module.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    return [node for node in tensors if (count := _elements(node.meta["val"])) and count % (N * T) == 0]


def _elements(value: Tensor) -> int:
    return math.prod(int(size) if isinstance(size, int) else size.node.hint for size in value.shape)


def compiled(
    function: Function, tensors: Sequence[Tensor], symbolic: Sequence[Sequence[int]] = ()
) -> Iterator[tuple[str, fx.GraphModule, list[Outcome]]]:
    """For each path, the graph of `function` after the passes; its results are checked against those from before."""
    traced = capture(function, *tensors, symbolic=symbolic)
    before = run(traced, *tensors)
    for path in ("absorbed", "chunked"):
        module = fx.GraphModule(traced, copy.deepcopy(traced.graph))
        outcomes = rewrite(module, path)
        check_right(before, run(module, *tensors))
        yield path, module, outcomes


def check_rewritten(function: Function, tensors: Sequence[Tensor], symbolic: Sequence[Sequence[int]] = ()) -> None:
    """Each path is taken, the result is right, and no tensor of heads and keys is left."""
    for path, module, outcomes in compiled(function, tensors, symbolic):
        assert [(o.path, o.reason) for o in outcomes] == [(path, "asked for by mla.path")]
        assert not unfolded(module)
