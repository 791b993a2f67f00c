"""Gradients of MLA: keys and values are up-projected again for them, a group of heads at a time."""

from .aten import attend_backward
from .gpu import attend_backward_on_gpu
from .native import attend_backward_on_cpu

__all__ = ["attend_backward", "attend_backward_on_cpu", "attend_backward_on_gpu"]
