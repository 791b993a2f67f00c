"""The dtypes of coded caches, whose numbers in few bits have scales beside them."""

from __future__ import annotations

from .fp8 import FP8
from .int4 import INT4, PACKED
from .int8 import INT8

CODED = (FP8, INT8, INT4)
"""What numbers of caches that have scales beside them may be."""
HELD = (FP8, INT8, PACKED)
"""The dtypes of the tensors that hold them, in this order."""
