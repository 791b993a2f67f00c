"""`mla::append_latents`: quantise tokens to FP8 and write them to a cache."""

from .aten import append_latents_aten
from .gpu import append_latents_gpu
from .reference import append_latents_reference

__all__ = ["append_latents_aten", "append_latents_gpu", "append_latents_reference"]
