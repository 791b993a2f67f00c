"""`mla::expanded_attention`: attention over up-projected keys and values, a chunk of them at a time."""

from .aten import expanded_attention_aten
from .reference import expanded_attention_reference

__all__ = ["expanded_attention_aten", "expanded_attention_reference"]
