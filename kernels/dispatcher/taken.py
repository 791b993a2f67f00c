"""What the C++ takes of an op, as far as a graph can tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...coded import CODED
from ..native import TYPES


def takes(arguments: Mapping[str, Any]) -> bool:
    """Whether a kernel in C++ computes an op of these arguments by name, whatever their values and sizes are.

    Not under a mask: of that of a row a sequence only a run knows whether it hides keys before and after a range.
    """
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    known = tensors[0].dtype in TYPES and tensors[0].dtype not in CODED
    indices, latent = arguments.get("indices"), arguments.get("latent")
    named = indices is None or (
        not arguments["uniform_when_empty"] and latent is not None and statically_known_true(latent.shape[1] > 0)
    )
    return known and named and arguments.get("mask") is None and all(t.device.type == "cpu" for t in tensors)
