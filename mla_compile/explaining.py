"""`explain`: trace and rewrite a model afresh, run it once, and report what became of its attentions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .dynamo.afresh import compiled_afresh
from .report import Report, merged


# torch has no type stubs for `disable`.
@torch.compiler.disable(reason="it compiles what it is given")  # type: ignore[untyped-decorator]
def explain(model: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Report:
    """Trace `model` afresh, rewrite it as `backend="mla"` does, run it once on the arguments without gradients, and
    report what became of its attentions. Inductor generates no code, and code that was compiled before stays.

    The run has the usual side effects on the model and on caches among the arguments. `options` are those of
    `torch.compile`.
    """
    from .backend import compile_and_record
    from .compilation import Examination

    kept: list[Report] = []

    def fresh(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        call, report = compile_and_record(graph, inputs, options, kind=Examination)
        kept.append(report)
        return call

    with torch.no_grad(), compiled_afresh(model, fresh) as compiled:
        compiled(*args, **kwargs)
    return merged(kept)
