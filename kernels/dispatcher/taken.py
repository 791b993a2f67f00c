"""Which calls of an op the C++ takes, as far as a graph can tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...coded import HELD
from ..native import TYPES


def takes(op: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a C++ kernel computes an op with these arguments, by name, whatever their values and sizes are.

    Under a mask only attention over latents, of one sequence each or in pages.
    """
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if op == "index_scores":  # C++ that only Python calls
        return False
    known = tensors[0].dtype in TYPES and tensors[0].dtype not in HELD
    indices, latent = arguments.get("indices"), arguments.get("latent")
    named = indices is None or (
        not arguments["uniform_when_empty"] and latent is not None and statically_known_true(latent.shape[1] > 0)
    )
    unmasked = op in ("latent_attention", "paged_latent_attention") or arguments.get("mask") is None
    return known and named and unmasked and all(t.device.type == "cpu" for t in tensors)
