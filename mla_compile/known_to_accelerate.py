"""`TrainingArguments(torch_compile_backend="mla")`: accelerate's list of compilers, with ours in it.

accelerate, and with it transformers' `Trainer`, does not ask torch which backends there are: it has an enum of its own.
An enum asks its `_missing_` for values that it does not know before it refuses them.
"""

from __future__ import annotations

from typing import Any

_BACKEND = "MLA"
"""accelerate writes backends in capitals, and hands them to `torch.compile` in small letters."""


def register_with_accelerate() -> None:
    """Make `mla` a backend that accelerate takes, in this process.

    From then on `transformers.TrainingArguments(torch_compile=True, torch_compile_backend="mla")`,
    `Accelerator(dynamo_backend="mla")` and `ACCELERATE_DYNAMO_BACKEND=mla` compile with it. A second call does nothing.

    Raises: ModuleNotFoundError, where accelerate is not installed.
    """
    from accelerate.utils import DynamoBackend

    try:
        DynamoBackend(_BACKEND)
    except ValueError:
        _add(DynamoBackend)


def _add(backends: Any) -> None:
    """A member of the enum that only `_missing_` knows, as those of flags are that stand for several."""
    ours = str.__new__(backends, _BACKEND)
    ours._name_ = ours._value_ = _BACKEND
    refuse = backends._missing_
    backends._missing_ = classmethod(lambda cls, value: ours if value == _BACKEND else refuse(value))
