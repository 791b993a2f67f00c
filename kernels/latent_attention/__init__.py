"""`mla::latent_attention`: attention over the latent cache itself."""

from .aten import latent_attention_aten
from .backward import latent_attention_backward_aten
from .gpu import latent_attention_gpu
from .native import latent_attention_cpu
from .reference import latent_attention_reference

__all__ = [
    "latent_attention_aten",
    "latent_attention_backward_aten",
    "latent_attention_cpu",
    "latent_attention_gpu",
    "latent_attention_reference",
]
