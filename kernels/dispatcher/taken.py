"""Which calls of an op the C++ takes, as far as a graph can tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...coded import CODED
from ..native import TYPES


def takes(arguments: Mapping[str, Any]) -> bool:
    """Whether a C++ kernel computes an op with these arguments, by name, whatever their values and sizes are.

    Not under a mask: the kernels take a mask of one row per sequence only if the keys that it leaves are a range, which
    only a run knows.
    """
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    known = tensors[0].dtype in TYPES and tensors[0].dtype not in CODED
    indices, latent = arguments.get("indices"), arguments.get("latent")
    named = indices is None or (
        not arguments["uniform_when_empty"] and latent is not None and statically_known_true(latent.shape[1] > 0)
    )
    return known and named and arguments.get("mask") is None and all(t.device.type == "cpu" for t in tensors)
