"""Caches that are filled under `torch.inference_mode` and go on without it: torch refuses to write to tensors that were
made under it.

In compiled code nothing is done: torch traces it without inference mode, and what Inductor generates writes to any
tensor. `mode="lite"` generates less: it calls ops as they are, which refuse, with stock Inductor too.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def to_be_written() -> contextlib.AbstractContextManager[object]:
    """A context in which new tensors may be written in every mode. Gradients may be on in it: only allocate there."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


def is_locked(tensor: Tensor) -> bool:
    """Whether a tensor, which compiled code made under inference mode, cannot be written now."""
    return not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled()) and tensor.is_inference()
