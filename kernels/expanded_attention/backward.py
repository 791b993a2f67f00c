"""Gradients of `mla::expanded_attention`: see `kernels/backward`."""

from __future__ import annotations

from ..backward import attend_backward, attend_backward_on_cpu, attend_backward_on_gpu
from ..bundles import checked, implement
from .arguments import ExpandedAttentionBackward

expanded_attention_backward_aten = checked(ExpandedAttentionBackward, attend_backward)
expanded_attention_backward_cpu = checked(ExpandedAttentionBackward, attend_backward_on_cpu)
expanded_attention_backward_gpu = checked(ExpandedAttentionBackward, attend_backward_on_gpu)
implement("expanded_attention_backward", "CompositeExplicitAutograd", expanded_attention_backward_aten)
implement("expanded_attention_backward", "CPU", expanded_attention_backward_cpu)
implement("expanded_attention_backward", "CUDA", expanded_attention_backward_gpu)
