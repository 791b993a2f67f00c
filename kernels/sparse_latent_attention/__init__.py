"""`mla::sparse_latent_attention`: attention over the keys of a latent cache that each query names."""

from .aten import sparse_latent_attention_aten
from .gpu import sparse_latent_attention_gpu
from .native import sparse_latent_attention_cpu
from .reference import sparse_latent_attention_reference

__all__ = [
    "sparse_latent_attention_aten",
    "sparse_latent_attention_cpu",
    "sparse_latent_attention_gpu",
    "sparse_latent_attention_reference",
]
