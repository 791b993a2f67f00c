"""Passes of the user's own that Inductor runs on Dynamo's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import _recursive_pre_grad_passes


def has_pre_grad() -> bool:
    """Whether the user has set a pass that Inductor runs before gradients are made."""
    return inductor_config.use_pre_grad_passes and inductor_config.pre_grad_custom_pass is not None


def after_pre_grad(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """The graph after that pass, and Inductor's own that run with it; as it is if there is none."""
    return _recursive_pre_grad_passes(module, inputs) if has_pre_grad() else module
