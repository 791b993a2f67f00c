"""Gradients of `mla::expanded_attention`: see `kernels/backward.py`."""

from __future__ import annotations

from torch import Tensor

from ..backward import Attended, attend_backward
from ..bundles import checked, implement
from .arguments import ExpandedAttentionBackward


def _backward(x: ExpandedAttentionBackward) -> list[Tensor]:
    return attend_backward(Attended(**vars(x)))


expanded_attention_backward_aten = checked(ExpandedAttentionBackward, _backward)
implement("expanded_attention_backward", "CompositeExplicitAutograd", expanded_attention_backward_aten)
