"""`mla::append_latents`: tokens quantised to FP8 into a cache."""

from .aten import append_latents_aten
from .gpu import append_latents_gpu
from .reference import append_latents_reference

__all__ = ["append_latents_aten", "append_latents_gpu", "append_latents_reference"]
