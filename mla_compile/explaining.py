"""`explain`: a model traced and rewritten afresh, run once, and what became of its attentions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .report import Report, merged, reports


def explain(model: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Report:
    """Trace `model` afresh, rewrite it as `backend="mla"` does, run it once on the arguments without gradients, and say
    what became of its attentions. Inductor generates no code.

    What the model or the caches among the arguments keep from a run, they keep from this one too. `options` are those
    of `torch.compile`.
    """
    from .backend import examined

    def fresh(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return examined(graph, inputs, options)

    before = len(reports())
    compiled = torch.compile(model, backend=fresh)
    with torch.no_grad():
        compiled(*args, **kwargs)
    return merged(reports()[before:])
