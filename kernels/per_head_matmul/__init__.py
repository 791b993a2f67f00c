"""`mla::per_head_matmul`: a product with one matrix per head."""

from .aten import per_head_matmul_aten
from .native import per_head_matmul_cpu
from .reference import per_head_matmul_reference

__all__ = ["per_head_matmul_aten", "per_head_matmul_cpu", "per_head_matmul_reference"]
