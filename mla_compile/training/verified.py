"""The checks of `mla.verify` where gradients are needed: of sites of a Dynamo graph, and of those in its checkpoints.

The Dynamo graph from before the passes runs once, operation by operation. What it gives a checkpoint are the inputs of
that checkpoint's checks. Results of its higher-order operators are among the inputs of its own check, as they are among
those of the captured graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mla_compile.dynamo.regions import is_checkpoint
from mla_compile.verify import Check, no_random_numbers_used


def check_of_parts(
    module: fx.GraphModule, given: Sequence[str], own: Check | None, of_checkpoints: Mapping[str, Sequence[Check]]
) -> Check:
    """A check on the inputs of a Dynamo graph.

    `own` is on the values of the nodes `given`; those of a checkpoint, by the name of its graph, are on its inputs.
    """

    def on(inputs: Sequence[Any]) -> None:
        run = _Run(module, given if own is not None else (), of_checkpoints)
        with torch.no_grad(), no_random_numbers_used(inputs):
            run.run(*map(_copy, inputs))
        if own is not None:
            own([leaf for name in given for leaf in pytree.tree_leaves(run.found[name])])

    return on


class _Run(fx.Interpreter):
    """Runs a Dynamo graph with the checks of its checkpoints, and copies the values of some nodes to `found`."""

    def __init__(
        self, module: fx.GraphModule, given: Sequence[str], of_checkpoints: Mapping[str, Sequence[Check]]
    ) -> None:
        super().__init__(module)
        self.given, self.of_checkpoints = {*given}, of_checkpoints
        self.found: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = self._checkpoint(n) if is_checkpoint(n) else super().run_node(n)
        if n.name in self.given:
            self.found[n.name] = pytree.tree_map(_copy, value)  # the graph may write to it
        return value

    def _checkpoint(self, n: fx.Node) -> Any:
        (body, *inputs), _ = self.fetch_args_kwargs_from_env(n)
        (name, *_) = n.args
        assert isinstance(name, fx.Node)
        for check in self.of_checkpoints.get(str(name.target), ()):
            check(inputs)
        return body(*inputs)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
