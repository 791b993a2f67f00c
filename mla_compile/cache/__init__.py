"""A paged latent cache: the pools that pages come from, and the tables that say which sequence holds which page.

The transformers `Cache` over both is in `latent_cache`, which imports transformers if it is installed.
"""

from .fp8_pool import FP8PagePool
from .int4_pool import INT4PagePool
from .int8_pool import INT8PagePool
from .pool import PagePool
from .table import BlockTable, stack

__all__ = ["BlockTable", "FP8PagePool", "INT4PagePool", "INT8PagePool", "PagePool", "stack"]
