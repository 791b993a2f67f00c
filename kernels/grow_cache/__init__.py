"""`mla::grow_cache`: a cache and new tokens, joined in memory that is used again."""

from .aten import grow_cache_aten
from .reference import grow_cache_reference

__all__ = ["grow_cache_aten", "grow_cache_reference"]
