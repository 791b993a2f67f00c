"""Register an implementation of every mla op, as a side effect of being imported.

The package's `__init__` does not do this, because in a checkout `import kernels` also finds the top-level folder of
that name.
"""

from mla_compile.kernels import (
    append_latents,
    expanded_attention,
    grow_cache,
    index_scores,
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
    "grow_cache",
    "index_scores",
    "latent_attention",
    "merge_states",
    "paged_expanded_attention",
    "paged_latent_attention",
    "per_head_matmul",
    "sparse_latent_attention",
    "widened_matmul",
]
