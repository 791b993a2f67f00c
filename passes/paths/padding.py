"""Put zeros beside the output of an attention whose values were padded."""

from __future__ import annotations

import torch
from torch import Tensor

from ..algebra.terms import Dim
from ..code.reading import Realize
from ..mla.site import Site


def padded(o: Tensor, site: Site, realize: Realize) -> tuple[Tensor, Dim]:
    """The output `[B, Sq, N, V]` with all columns that the graph's output has, and their axes."""
    padding = site.attention.padding
    if padding is None:
        return o, site.attention.columns
    # torch's own padding turns symbolic sizes into numbers where it is traced without Python's dispatcher.
    zeros = [o.new_zeros((*o.shape[:3], realize(width))) for width in (padding.before, padding.after)]
    return torch.cat([zeros[0], o, zeros[1]], dim=-1), padding.columns
