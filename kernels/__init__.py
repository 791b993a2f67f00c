"""What the mla ops compute: importing this package registers an implementation of each.

One folder an op: `reference.py` is the equation, in any dtype, and the oracle of the tests; `aten.py` is made of ATen
operations, bounded in memory, and registered for every device.
"""

from .. import ops as _ops  # noqa: F401  the schemas, which the imports below implement
from . import expanded_attention, latent_attention, merge_states, per_head_matmul

__all__ = ["expanded_attention", "latent_attention", "merge_states", "per_head_matmul"]
