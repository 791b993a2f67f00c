"""Make accelerate accept "mla" as a backend, as in `TrainingArguments(torch_compile_backend="mla")`.

accelerate, and with it transformers' `Trainer`, does not ask torch which backends exist: it has its own enum. Before an
enum rejects an unknown value, it asks its `_missing_` method, which is what this module replaces.
"""

from __future__ import annotations

from typing import Any

_BACKEND = "MLA"
"""accelerate writes backends in upper case, and passes them to `torch.compile` in lower case."""


def register_with_accelerate() -> None:
    """Make accelerate accept the backend `mla` in this process.

    Afterwards `transformers.TrainingArguments(torch_compile=True, torch_compile_backend="mla")`,
    `Accelerator(dynamo_backend="mla")` and `ACCELERATE_DYNAMO_BACKEND=mla` compile with it. A second call does nothing.

    Raises: ModuleNotFoundError if accelerate is not installed.
    """
    from accelerate.utils import DynamoBackend

    try:
        DynamoBackend(_BACKEND)
    except ValueError:
        _add(DynamoBackend)


def _add(backends: Any) -> None:
    """Add a member that only `_missing_` returns, as `enum.Flag` does for combinations of flags."""
    ours = str.__new__(backends, _BACKEND)
    ours._name_ = ours._value_ = _BACKEND
    refuse = backends._missing_
    backends._missing_ = classmethod(lambda cls, value: ours if value == _BACKEND else refuse(value))
