"""`mla::merge_states`: one attention out of two over disjoint keys."""

from .aten import merge_states_aten
from .reference import merge_states_reference

__all__ = ["merge_states_aten", "merge_states_reference"]
