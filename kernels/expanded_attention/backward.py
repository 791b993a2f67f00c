"""Gradients of `mla::expanded_attention`: see `kernels/backward.py`."""

from __future__ import annotations

from ..backward import attend_backward
from ..bundles import checked, implement
from .arguments import ExpandedAttentionBackward

expanded_attention_backward_aten = checked(ExpandedAttentionBackward, attend_backward)
implement("expanded_attention_backward", "CompositeExplicitAutograd", expanded_attention_backward_aten)
