"""`mla::widened_matmul`: a product of half-precision matrices, computed in float32."""

from .aten import widened_matmul_aten
from .native import widened_matmul_cpu
from .reference import widened_matmul_reference

__all__ = ["widened_matmul_aten", "widened_matmul_cpu", "widened_matmul_reference"]
