"""Random graphs: the form of every tensor says what the graph computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.drawn import UNHURRIED
from tests.passes.graphs import capture
from tests.passes.trace.forms import check_all, whole

STEPS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "transpose": lambda x, y, n: x.transpose(n % 3, (n + 1) % 3),
    "merge and split": lambda x, y, n: x.reshape(-1, x.shape[2]).view(x.shape),
    "slice": lambda x, y, n: x[:, : max(n, 1)] if n % 2 else x[..., min(n // 2, x.shape[2] - 1) :],
    "cat": lambda x, y, n: torch.cat([x, y if y.shape[1:] == x.shape[1:] else x], 0),
    "cat of a broadcast": lambda x, y, n: torch.cat([x, x[:1].expand(x.shape)], n % 3),
    "select and expand": lambda x, y, n: x.select(n % 3, 0).unsqueeze(n % 3).expand(x.shape),
    "gram": lambda x, y, n: x @ x.transpose(1, 2),
    "project": lambda x, y, n: x @ x[0].transpose(0, 1),
    "product": lambda x, y, n: x @ y.transpose(1, 2) if x.shape[::2] == y.shape[::2] else x @ x.mT,
    "add": lambda x, y, n: x + y[:, :1, :1] if x.shape[0] == y.shape[0] else x + x[:1],
    "bias": lambda x, y, n: x @ x.mT + x[:1, :1, :1] * n,
    "pad": lambda x, y, n: F.pad(x, (0, 2)) + F.pad(x[..., :1], (n % 2, x.shape[2] + 1 - n % 2)),
    "scale": lambda x, y, n: x * 2.0,
    "write": lambda x, y, n: torch.slice_scatter(x, x[:, :1].neg(), 1, 1, 2) if x.shape[1] > 1 else x,
    "buffer": lambda x, y, n: buffer_of(x, x[:1].expand(x.shape)),
}


def buffer_of(a: Tensor, b: Tensor) -> Tensor:
    buffer = a.new_empty(a.shape[0], a.shape[1], a.shape[2] + b.shape[2])
    buffer[..., : a.shape[2]] = a
    buffer[..., a.shape[2] :] = b
    return buffer


EXACT = 2.0**40
"""Above this the sums of a check, which may take terms in another order, are no longer exact in double precision."""


def taken(steps: Sequence[tuple[str, int]], x: Tensor, y: Tensor) -> list[tuple[str, int]]:
    """The first of the steps: as long as the tensor stays small, in elements and in what they can be."""
    x, y = x.abs(), y.abs()
    for count, (name, n) in enumerate(steps):
        x, y = STEPS[name](x, y, n).abs(), x
        if x.max() > EXACT:
            return list(steps[:count])
        if x.numel() > 400:
            return list(steps[: count + 1])
    return list(steps)


@pytest.mark.parametrize("symbolic", [(), (0, 1), (0, 1, 2)], ids=["known", "tokens", "all"])
@settings(UNHURRIED, max_examples=10)
@given(steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 5)), min_size=1, max_size=6))
def test_the_forms_of_any_graph_are_right(symbolic: Sequence[int], steps: list[tuple[str, int]]) -> None:
    tensors = whole(2, 3, 4), whole(2, 3, 4, seed=1)
    chosen = taken(steps, *tensors)

    def program(x: Tensor, y: Tensor) -> Any:
        for name, n in chosen:
            x, y = STEPS[name](x, y, n), x
        return x

    check_all(capture(program, *tensors, symbolic=[symbolic] * 2), *tensors)
