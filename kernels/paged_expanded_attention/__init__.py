"""`mla::paged_expanded_attention`: attention over up-projected keys and values of a latent cache stored in pages."""

from .aten import paged_expanded_attention_aten
from .gpu import paged_expanded_attention_gpu
from .reference import paged_expanded_attention_reference

__all__ = ["paged_expanded_attention_aten", "paged_expanded_attention_gpu", "paged_expanded_attention_reference"]
