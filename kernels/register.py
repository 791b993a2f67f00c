"""Importing this module registers an implementation of every mla op.

It is not the package's `__init__`: a folder of this name at the top of a checkout is also what `import kernels` finds.
"""

from mla_compile.kernels import (
    append_latents,
    expanded_attention,
    latent_attention,
    merge_states,
    paged_expanded_attention,
    paged_latent_attention,
    per_head_matmul,
    sparse_latent_attention,
    widened_matmul,
)

__all__ = [
    "append_latents",
    "expanded_attention",
    "latent_attention",
    "merge_states",
    "paged_expanded_attention",
    "paged_latent_attention",
    "per_head_matmul",
    "sparse_latent_attention",
    "widened_matmul",
]
