"""The backend without Inductor's code: for tests of graphs, of which there are many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def interpreted(module: torch.fx.GraphModule, inputs: object, **kwargs: object) -> Callable[..., Any]:
    """In place of `compile_fx_inner`: run what the passes and the retrace made as it is."""
    from functorch.compile import make_boxed_func

    return make_boxed_func(module.forward)
