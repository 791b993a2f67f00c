"""Zeros beside the output of an attention whose values were padded."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..algebra.terms import Dim
from ..code.reading import Realize
from ..mla.site import Site


def padded(o: Tensor, site: Site, realize: Realize) -> tuple[Tensor, Dim]:
    """The output `[B, Sq, N, V]` with the columns that the graph's has, and their axes."""
    padding = site.attention.padding
    if padding is None:
        return o, site.attention.columns
    widths: Any = [realize(padding.before), realize(padding.after)]  # ints or SymInts
    return F.pad(o, widths), padding.columns
