"""`mla::paged_latent_attention`: attention over a latent cache stored in pages."""

from .aten import paged_latent_attention_aten
from .gpu import paged_latent_attention_gpu
from .native import paged_latent_attention_cpu
from .reference import paged_latent_attention_reference

__all__ = [
    "paged_latent_attention_aten",
    "paged_latent_attention_cpu",
    "paged_latent_attention_gpu",
    "paged_latent_attention_reference",
]
