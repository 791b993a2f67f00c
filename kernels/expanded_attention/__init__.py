"""`mla::expanded_attention`: attention over keys and values that are up-projected one chunk at a time."""

from .aten import expanded_attention_aten
from .backward import expanded_attention_backward_aten, expanded_attention_backward_gpu
from .gpu import expanded_attention_gpu
from .native import expanded_attention_cpu
from .reference import expanded_attention_reference

__all__ = [
    "expanded_attention_aten",
    "expanded_attention_backward_aten",
    "expanded_attention_backward_gpu",
    "expanded_attention_cpu",
    "expanded_attention_gpu",
    "expanded_attention_reference",
]
