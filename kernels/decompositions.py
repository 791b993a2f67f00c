"""The mla ops as plain ATen operations, for graphs that run where this library is not installed.

A decomposition may neither read values nor branch on a size, so most are the equations themselves, which keep in memory
the scores, with a head and a key axis, and in half precision float32 copies of their operands. `expanded_attention` and
`paged_expanded_attention`, whose equations would keep all up-projected keys, are loops over chunks instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .dispatcher import takes
from .expanded_attention.decomposition import expanded_attention_decomposition
from .index_scores.reference import index_scores_reference
from .latent_attention.reference import latent_attention_reference
from .merge_states.reference import merge_states_reference
from .paged_expanded_attention.decomposition import paged_expanded_attention_decomposition
from .paged_latent_attention.decomposition import paged_latent_attention_decomposition
from .per_head_matmul.reference import per_head_matmul_reference
from .sparse_latent_attention.reference import sparse_latent_attention_reference
from .widened_matmul.reference import widened_matmul_reference


def decompositions(kernels: bool = False) -> dict[Any, Callable[..., Any]]:
    """A table of decompositions into ATen operations, for `ExportedProgram.run_decompositions`.

    `append_latents`, which a program contains only if its module calls it, stays an op. With `kernels`, so does every
    call that a kernel of `library.py` takes.
    """
    mla = torch.ops.mla
    table: dict[Any, Callable[..., Any]] = {
        mla.latent_attention.default: _as_the_op(latent_attention_reference),
        mla.paged_latent_attention.default: _as_the_op(paged_latent_attention_decomposition),
        mla.sparse_latent_attention.default: _as_the_op(sparse_latent_attention_reference),
        mla.expanded_attention.default: expanded_attention_decomposition,
        mla.paged_expanded_attention.default: paged_expanded_attention_decomposition,
        mla.merge_states.default: _as_the_op(merge_states_reference),
        mla.per_head_matmul.default: per_head_matmul_decomposition,
        mla.widened_matmul.default: widened_matmul_reference,
        mla.grow_cache.default: grow_cache_decomposition,
        mla.index_scores.default: index_scores_decomposition,
    }
    return {op: _unless_taken(op, decomposition) for op, decomposition in table.items()} if kernels else table


def per_head_matmul_decomposition(x: Tensor, weight: Tensor) -> Tensor:
    """`mla::per_head_matmul` in a form that can be traced, rounded once, as the op is."""
    return per_head_matmul_reference(x, weight).contiguous()


def grow_cache_decomposition(past: Tensor, new: Tensor, dim: int) -> Tensor:
    """`mla::grow_cache` in new memory."""
    return torch.cat([past, new], dim).contiguous()


def index_scores_decomposition(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """`mla::index_scores`, with the products of all heads."""
    return index_scores_reference(q, k, weights).contiguous()


def _unless_taken(op: torch._ops.OpOverload, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]

    @wraps(decomposition)
    def unless_taken(*operands: Any, **more: Any) -> Any:
        taken = takes(op._schema.name.removeprefix("mla::"), dict(zip(names, operands, strict=False)) | more)
        return NotImplemented if taken else decomposition(*operands, **more)

    return unless_taken


def _as_the_op(equation: Callable[..., Any]) -> Callable[..., Any]:
    """An equation of attention, computed in at least float32, whose results have the dtypes and strides of the op's."""

    @wraps(equation)
    def decomposition(first: Tensor, *operands: Any, **more: Any) -> Any:
        dtype = torch.promote_types(first.dtype, torch.float32)
        raised = [t.to(dtype) if isinstance(t, Tensor) and t.dtype == first.dtype else t for t in operands]
        o, lse = equation(first.to(dtype), *raised, **more)
        return o.to(first.dtype).contiguous(), lse.float().contiguous()

    return decomposition
