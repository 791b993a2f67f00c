"""`explain`: a fresh compilation of a model, run once, and what became of its attentions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .report import Report, merged, reports


def explain(model: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Report:
    """Compile `model` afresh with `backend="mla"`, run it once on the arguments without gradients, and say what became
    of its attentions.

    What the model or the caches among the arguments keep from a run, they keep from this one too. `options` are those
    of `torch.compile`.
    """
    from .backend import mla

    def fresh(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return mla(graph, inputs, options=options)

    before = len(reports())
    compiled = torch.compile(model, backend=fresh)
    with torch.no_grad():
        compiled(*args, **kwargs)
    return merged(reports()[before:])
