"""A latent cache in pages: the pool they come from, and the tables that say whose they are.

`latent_cache` holds the transformers `Cache` over both; it alone imports transformers, and only if that is there.
"""

from .fp8_pool import FP8PagePool
from .int8_pool import INT8PagePool
from .pool import PagePool
from .table import BlockTable, stack

__all__ = ["BlockTable", "FP8PagePool", "INT8PagePool", "PagePool", "stack"]
