"""`mla::merge_states`: one attention out of two over disjoint keys."""

from .aten import merge_states_aten
from .gpu import merge_states_gpu
from .reference import merge_states_reference

__all__ = ["merge_states_aten", "merge_states_gpu", "merge_states_reference"]
