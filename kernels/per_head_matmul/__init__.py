"""`mla::per_head_matmul`: one matrix a head."""

from . import aten as aten
