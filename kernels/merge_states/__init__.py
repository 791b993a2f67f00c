"""`mla::merge_states`: merge attention over two disjoint sets of keys into one."""

from .aten import merge_states_aten
from .gpu import merge_states_gpu
from .reference import merge_states_reference

__all__ = ["merge_states_aten", "merge_states_gpu", "merge_states_reference"]
