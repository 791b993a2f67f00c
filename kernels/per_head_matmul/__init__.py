"""`mla::per_head_matmul`: one matrix a head."""

from .aten import per_head_matmul_aten
from .reference import per_head_matmul_reference

__all__ = ["per_head_matmul_aten", "per_head_matmul_reference"]
