"""The attention ops of the library: names, schemas, shapes.

Each op is defined in the namespace `mla` with what a compiler needs to trace it, symbolic sizes included.
`mla_compile.kernels`, which this module does not import, registers what the ops compute on data. The exception is
`sealed_attention`, torch's own attention under another name, which is implemented here.

Sizes are written `B Sq T N Lq L P R V`: sequences, query tokens, key tokens, heads, ranks of query and latent, and
widths of a head's nope, rope and value part. Inputs may have any strides. Only the rows of `append_latents` are
mutated, and no output aliases an input.
`lse` is the natural log of the sum of the exponentials of a query's scores, always float32. A query with no key to
attend to has `o = 0` and `lse = -inf`, so that partial results merge without a special case.

Masks of `latent_attention`, `sparse_latent_attention` and `expanded_attention` are None, bool (True means attend) or
floating (added to the scaled scores), have rank 4, and broadcast to `[B, N, Sq, T]`. A `causal_offset` also limits
query i to keys j <= i + causal_offset; None means no causal limit. Keys that a bool mask or the causal limit hides from
every query of a sequence take no part in the arithmetic, so the unwritten tail of a cache may hold anything, NaN
included.

`expanded_attention` and `latent_attention` can be differentiated once, by ops of their own; `per_head_matmul` can be
differentiated any number of times. The backwards of all other ops raise NotImplementedError.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .op_fakes import register_fakes
from .op_gradients import differentiate_by_op, differentiate_per_head_matmul, refuse_to_differentiate

__all__ = [
    "append_latents",
    "expanded_attention",
    "expanded_attention_backward",
    "grow_cache",
    "index_scores",
    "latent_attention",
    "latent_attention_backward",
    "merge_states",
    "paged_expanded_attention",
    "paged_latent_attention",
    "per_head_matmul",
    "sealed_attention",
    "sparse_latent_attention",
    "widened_matmul",
]

_LIBRARY = torch.library.Library("mla", "DEF")

# Inductor may pass buffers of any strides to these ops. Its default for custom ops, exact strides, would copy a cache
# whose layout differs from the traced one.
_ANY_STRIDES = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)


def _define(schema: str, tags: tuple[torch.Tag, ...] = _ANY_STRIDES) -> None:
    """Define an op, unless a library built by `kernels/library.py` was loaded, which defines it by the same schema."""
    if not hasattr(torch.ops.mla, schema.partition("(")[0]):
        _LIBRARY.define(schema, tags=tags)


_define(
    "sealed_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, "
    "float? scale, bool enable_gqa) -> Tensor",
    # The layout of the result follows from that of the inputs, so Inductor has to keep both as traced.
    tags=(torch.Tag.needs_exact_strides, torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
)
_define(
    "latent_attention(Tensor q_latent, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor? mask, "
    "SymInt? causal_offset, float scale) -> (Tensor, Tensor)",
)
_define(
    "latent_attention_backward(Tensor grad_o, Tensor? grad_lse, Tensor q_latent, Tensor q_rope, Tensor latent, "
    "Tensor k_rope, Tensor? mask, SymInt? causal_offset, float scale, Tensor o, Tensor lse, bool[] wanted) -> Tensor[]",
)
_define(
    "sparse_latent_attention(Tensor q_latent, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor indices, "
    "Tensor? mask, SymInt? causal_offset, float scale, bool uniform_when_empty, Tensor? latent_scales=None) "
    "-> (Tensor, Tensor)",
)
_define(
    "paged_latent_attention(Tensor q_latent, Tensor q_rope, Tensor latent_pages, Tensor rope_pages, "
    "Tensor block_table, Tensor seq_lens, bool causal, float scale, Tensor? latent_scales=None, "
    "SymInt? split_tokens=None, Tensor? mask=None, Tensor? first_positions=None) -> (Tensor, Tensor)",
)
_define(
    "expanded_attention(Tensor q, Tensor latent, Tensor k_rope, Tensor w_uk, Tensor w_uv, Tensor? mask, "
    "SymInt? causal_offset, float scale, SymInt workspace_tokens, *, str? kernels=None, "
    "bool measure=False) -> (Tensor, Tensor)",
)
_define(
    "expanded_attention_backward(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor latent, Tensor k_rope, Tensor w_uk, "
    "Tensor w_uv, Tensor? mask, SymInt? causal_offset, float scale, SymInt workspace_tokens, Tensor o, Tensor lse, "
    "bool[] wanted, *, str? kernels=None, bool measure=False) -> Tensor[]",
)
_define(
    "paged_expanded_attention(Tensor q, Tensor latent_pages, Tensor rope_pages, Tensor block_table, Tensor seq_lens, "
    "Tensor w_uk, Tensor w_uv, bool causal, float scale, SymInt workspace_tokens, Tensor? latent_scales=None, "
    "Tensor? mask=None, Tensor? first_positions=None, Tensor? query_lens=None) -> (Tensor, Tensor)",
)
_define(
    "merge_states(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b) -> (Tensor, Tensor)",
)
_define(
    "append_latents(Tensor latent, Tensor k_rope, Tensor slots, Tensor(a!) rows, Tensor? scale=None) -> ()",
)
_define("per_head_matmul(Tensor x, Tensor weight) -> Tensor")
_define("widened_matmul(Tensor x, Tensor weight, Tensor? ends=None) -> Tensor")
_define("grow_cache(Tensor past, Tensor new, int dim) -> Tensor")
_define("index_scores(Tensor q, Tensor k, Tensor weights) -> Tensor")

sealed_attention = torch.ops.mla.sealed_attention
"""`torch.nn.functional.scaled_dot_product_attention`, opaque to decomposition.

It takes all arguments of that function, in the same order, and returns the same result in the same layout. Under
autocast its floating inputs are cast as torch casts those of the original.
"""

latent_attention = torch.ops.mla.latent_attention
"""Multi-query attention over a latent cache: absorbed MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    score[b, i, n, j] = scale * (q_latent[b, i, n] . latent[b, j] + q_rope[b, i, n] . k_rope[b, j]) + mask[b, n, i, j]
    o[b, i, n] = sum_j softmax_j(score)[b, i, n, j] latent[b, j]

Args: q_latent `[B, Sq, N, L]`, q_rope `[B, Sq, N, R]` (R may be 0), latent `[B, T, L]`, k_rope `[B, T, R]`, all of one
floating dtype; mask and causal_offset as described for the module; scale.
Returns: o `[B, Sq, N, L]`, contiguous, of q_latent's dtype, and lse `[B, Sq, N]`, float32.
Raises: KernelError (a ValueError) naming the expected and the found shape or dtype.
"""

latent_attention_backward = torch.ops.mla.latent_attention_backward
"""Gradients of `latent_attention`'s operands, given those of its results.

It processes as many heads at a time as `expanded_attention_backward` with a workspace of 1,024 tokens.

Args: grad_o like o; grad_lse like lse, or None for zeros; the operands of the forward; its o and lse; wanted, a flag
for each of q_latent, q_rope, latent, k_rope and mask. A mask whose gradient is wanted must be a floating one.
Returns: the wanted gradients in that order, contiguous, each in the shape and dtype of its operand.
Raises: KernelError (a ValueError) naming the expected and the found shape or dtype.
"""

paged_latent_attention = torch.ops.mla.paged_latent_attention
"""`latent_attention` over a paged cache (vLLM's PagedAttention, arXiv 2309.06180, with one latent per token).

    latent[b, j] = latent_pages[block_table[b, j // page_size], j % page_size];  k_rope likewise from rope_pages
    o, lse = latent_attention over the keys j < seq_lens[b], and with causal j <= first_positions[b] + i for query i

first_positions defaults to seq_lens - Sq: the queries are the last Sq tokens of their sequence, the pages hold their
latents, and seq_lens counts them. A query before a sequence's first token has no key. Pages and rows that no query
sees may hold anything, and so may the entries of block_table behind a sequence's last page.

latent_pages and rope_pages are most often column ranges of one pool: `pages[..., :L]` and `pages[..., L:]`.

FP8, INT8 and INT4: latent_pages is float8_e4m3fn, int8 or, for INT4, uint8 `[pages, page_size, L / 2]` with the numbers
of two neighbouring columns plus 8 in the lower and the upper half of a byte; latent_scales has one factor for each of
its G equal groups of columns (in INT4 of an even number of them). rope_pages has the dtype of q_rope or, where G is 1,
that of latent_pages in FP8 or INT8, with the same factor.

Args: q_latent `[B, Sq, N, L]`, q_rope `[B, Sq, N, R]` (R may be 0), latent_pages `[pages, page_size, L]`, rope_pages
`[pages, page_size, R]`, all of one floating dtype (except coded pages); block_table `[B, max_pages]` and seq_lens
`[B]`, int32 or int64; causal; scale; latent_scales None, or `[pages, page_size, G]`, float32, where sizes of 1
broadcast; split_tokens None (keys are split to suit batch and device), or the number of keys of a sequence that one
program sums up, which makes a sequence's result bitwise the same in any batch; mask as described for the module, over T
keys, at least as many as the longest sequence has (a key is seen if seq_lens, causal and mask all allow it);
first_positions None or `[B]`, int32 or int64.
Returns: o `[B, Sq, N, L]`, contiguous, of q_latent's dtype, and lse `[B, Sq, N]`, float32.
Raises: KernelError (a ValueError) naming the expected and the found shape, dtype or, on CPU, length or page.
"""

sparse_latent_attention = torch.ops.mla.sparse_latent_attention
"""`latent_attention` in which each query names its keys (DeepSeek-V3.2, arXiv 2512.02556).

    j(e) = indices[b, i, e]
    score[b, i, n, e] = scale * (q_latent[b, i, n] . latent[b, j(e)] + q_rope[b, i, n] . k_rope[b, j(e)])
                        + mask[b, n, i, j(e)]
    o[b, i, n] = sum_e softmax_e(score)[b, i, n, e] latent[b, j(e)]

An index outside 0..T-1 (for instance -1) names no key. A key that the mask or the causal limit hides is not attended
to; a key named twice counts twice. Only named keys are read, and only their elements of the mask.

Args: q_latent `[B, Sq, N, L]`, q_rope `[B, Sq, N, R]` (R may be 0), latent `[B, T, L]`, k_rope `[B, T, R]`, all of one
floating dtype; indices `[B, Sq, topk]`, int32 or int64; mask (over all T keys) and causal_offset as described for the
module; scale; uniform_when_empty, whether a query without a key to attend to gets the mean of all T latents instead of
0 (its lse is -inf either way), which is the result of a mask that hides keys by a finite number that outweighs every
score; latent_scales None, or `[B, T, G]` for a cache in FP8, INT8 or INT4, with the meaning that it has for
`paged_latent_attention`.
Returns: o `[B, Sq, N, L]`, contiguous, of q_latent's dtype, and lse `[B, Sq, N]`, float32.
Raises: KernelError (a ValueError) naming the expected and the found shape or dtype.
"""

expanded_attention = torch.ops.mla.expanded_attention
"""MLA that up-projects keys and values one chunk of tokens at a time (arXiv 2405.04434, equations 9 to 19).

    k[b, j, n] = cat(w_uk[n] latent[b, j], k_rope[b, j]);  v[b, j, n] = w_uv[n] latent[b, j]
    o[b, i, n] = sum_j softmax_j(scale * q[b, i, n] . k[b, j, n] + mask[b, n, i, j]) v[b, j, n]

Heads may have rope keys of their own: with k_rope `[B, T, N, R]`, k[b, j, n] ends with k_rope[b, j, n].
Keys and values may have a latent each: with w_uk `[N, P, Lk]`, w_uv `[N, V, Lv]` and Lk + Lv = L, keys come from the
first Lk columns of latent, and values from the last Lv.

Args: q `[B, Sq, N, P + R]` with the nope part first, latent `[B, T, L]`, k_rope `[B, T, R]` or `[B, T, N, R]`,
w_uk `[N, P, L]`, w_uv `[N, V, L]`, all of one floating dtype; mask and causal_offset as described for the module;
scale; workspace_tokens, the largest number of tokens whose keys and values exist at one time (at least 1).
What is asked for on a GPU, also for the gradients: kernels, the value of `mla.kernels`, and measure, whether to measure
as `mode="max-autotune"` does. None and False leave it to where the op is called.
Returns: o `[B, Sq, N, V]`, contiguous, of q's dtype, and lse `[B, Sq, N]`, float32.
Raises: KernelError (a ValueError) naming the expected and the found shape or dtype.
"""

expanded_attention_backward = torch.ops.mla.expanded_attention_backward
"""Gradients of `expanded_attention`'s operands, given those of its results. Keys and values are up-projected again.

It processes as many heads at a time as keep the keys of all tokens within a quarter of the forward's workspace, and at
least one (on CPU one per thread). On a GPU these are as many as the forward takes, or as keep the device busy.

Args: grad_o like o; grad_lse like lse, or None for zeros; the operands of the forward; its o and lse; wanted, a flag
for each of q, latent, k_rope, w_uk, w_uv and mask. A mask whose gradient is wanted must be a floating one.
kernels and measure as for the forward.
Returns: the wanted gradients in that order, contiguous, each in the shape and dtype of its operand.
Raises: KernelError (a ValueError) naming the expected and the found shape or dtype.
"""

paged_expanded_attention = torch.ops.mla.paged_expanded_attention
"""`expanded_attention` over a paged cache, for sequences of any lengths, each with its own number of new tokens.

    latent[b, j] = latent_pages[block_table[b, j // page_size], j % page_size];  k_rope likewise from rope_pages
    o, lse = expanded_attention over the keys j < seq_lens[b], and with causal j <= first_positions[b] + i for query i

Keys and values may have a latent each, as in `expanded_attention`: Lk and Lv columns of latent_pages, side by side.
block_table, seq_lens, first_positions, mask and latent_scales are those of `paged_latent_attention`. Queries
i >= query_lens[b] are padding: they cost nothing and get o = 0, lse = -inf. Without query_lens no query is padding.
first_positions defaults to seq_lens - query_lens (without query_lens: - Sq), so the queries are the last tokens of
their sequence. A query behind the last token of its sequence, unless it is padding, attends to all tokens.

On a GPU the kernels skip work by lengths that only the device knows, but chunks cover all tokens that block_table has
room for: a table wider than the longest sequence costs up-projections.

Args: q `[B, Sq, N, P + R]` with the nope part first, latent_pages `[pages, page_size, L]`, rope_pages
`[pages, page_size, R]`, w_uk `[N, P, L]`, w_uv `[N, V, L]`, all of one floating dtype (except coded pages);
block_table `[B, max_pages]`; seq_lens `[B]`; causal; scale; workspace_tokens, the largest number of tokens whose keys
and values exist at one time (at least 1); latent_scales None or `[pages, page_size, G]`; mask; first_positions None or
`[B]`; query_lens None or `[B]`, from 0 to Sq, int32 or int64.
Returns: o `[B, Sq, N, V]`, contiguous, of q's dtype, and lse `[B, Sq, N]`, float32.
Raises: KernelError (a ValueError) naming the expected and the found shape, dtype or, on CPU, length or page.
"""

merge_states = torch.ops.mla.merge_states
"""Merge attention over each of two disjoint sets of keys (FlashInfer, arXiv 2501.01005, section 2.2).

    lse = log(exp(lse_a) + exp(lse_b));  o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b

Args: o_a and o_b of one shape `[..., V]` and dtype, lse_a and lse_b `[...]`, float32.
Returns: o, contiguous, like o_a, and lse `[...]`, float32. Two empty sets merge to `o = 0`, `lse = -inf`.
Raises: KernelError (a ValueError) naming the expected and the found shape or dtype.
"""

append_latents = torch.ops.mla.append_latents
"""Quantise tokens to FP8 and write them to a cache in place; the attention ops invert this with `latent_scales`.

    rows[slots[t] // page_size, slots[t] % page_size] = latent[t], k_rope[t]

Without a scale, a row has the layout of `mla_compile.fp8.RowLayout`: each token and group of latent columns has a
scale, its greatest magnitude over 448, and the rope key is not quantised. With a scale, which holds for all tokens, a
row is the latent and the rope key divided by it, in e4m3fn, clamped to magnitudes of at most 448.

Args: latent `[tokens, L]`, k_rope `[tokens, R]` (R may be 0), of one floating dtype; slots `[tokens]`, int32 or int64:
each token's place, all different, negative for tokens to skip; rows `[pages, page_size, row_bytes]` in uint8, or with
a scale `[pages, page_size, L + R]` in float8_e4m3fn, mutated; scale None, or one number in float32.
Raises: KernelError (a ValueError) naming the expected and the found shape, dtype or, on CPU, slot.
"""

per_head_matmul = torch.ops.mla.per_head_matmul
"""Multiply each head by its own matrix: this takes queries into latent space and outputs out of it.

    out[b, s, n, o] = sum_i x[b, s, n, i] weight[n, i, o]

Args: x `[B, Sq, N, I]` and weight `[N, I, O]` of one floating dtype; weight is most often a strided view of the user's.
Returns: `[B, Sq, N, O]`, contiguous.
Raises: KernelError (a ValueError) naming the expected and the found shape or dtype.
"""

widened_matmul = torch.ops.mla.widened_matmul
"""A matrix product of half-precision operands computed in float32, for CPUs without half-precision products.

    out[s, m] = sum_k x[s, k] weight[k, m]
    out[s, m] = sum_k x[s, k] weight[e, k, m] with ends, where e is the first group with s < ends[e]

Args: x `[S, K]` and weight `[K, M]`, or with ends `[E, K, M]`, of one floating dtype; ends None, or `[E]`, int32 or
int64, ascending: where each group of rows ends. Rows behind the last end belong to no group; their result is undefined.
Returns: `[S, M]`, contiguous, float32 (float64 for float64 operands), not rounded to the dtype of the operands.
Raises: KernelError (a ValueError) naming the expected and the found shape or dtype.
"""

grow_cache = torch.ops.mla.grow_cache
"""`torch.cat([past, new], dim)` of a cache, on CPU in memory that an earlier result of this op gave back.

A cache that is copied as it grows, by some tokens at a step, needs new memory for each step. The system would zero
every page of it anew, which costs more than attention to what it holds. Never is more memory kept for later than
results of this op take.

Args: past and new of one rank, dtype and device, whose sizes differ in dimension dim alone.
Returns: their concatenation, contiguous.
Raises: KernelError (a ValueError) naming the expected and the found shape, dtype or dimension.
"""


index_scores = torch.ops.mla.index_scores
"""The scores by which an indexer chooses keys, summed over its heads (DeepSeek-V3.2, arXiv 2512.02556).

    out[b, i, j] = sum_h weights[b, i, h] max(q[b, i, h] . k[b, j], 0)

The products of single heads are never in memory for more than some queries at a time. NaN stays NaN.

Args: q `[B, Sq, H, D]` and k `[B, T, D]`, of one floating dtype; weights `[B, Sq, H]`, float32, or float64 as q.
Returns: `[B, Sq, T]`, contiguous, of weights' dtype, in which everything is summed.
Raises: KernelError (a ValueError) naming the expected and the found shape or dtype.
"""


def _sealed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The implementation, and also the fake: on fake tensors torch chooses the kernel, and so the layout, as on data.

    torch's meta functions do not require as many values as keys, but two caches that are inputs have separate symbols
    for these sizes, so the check states that they are equal.
    """
    torch._check(key.shape[-2] == value.shape[-2])
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _register_autocast(device_type: str) -> None:
    """Cast as torch's autocast rule for attention does: floating inputs on this device, except float64."""
    key = f"Autocast{device_type.upper()}"

    def cast(arg: Tensor | None) -> Tensor | None:
        if arg is None or not arg.is_floating_point() or arg.dtype == torch.float64 or arg.device.type != device_type:
            return arg
        return arg.to(torch.get_autocast_dtype(device_type))

    def sealed_attention_under_autocast(
        query: Tensor, key_: Tensor, value: Tensor, attn_mask: Tensor | None, *rest: Any
    ) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return sealed_attention(cast(query), cast(key_), cast(value), cast(attn_mask), *rest)

    _LIBRARY.impl("sealed_attention", sealed_attention_under_autocast, key)


_LIBRARY.impl("sealed_attention", _sealed_attention, "CompositeExplicitAutograd")
torch.library.register_fake("mla::sealed_attention", _sealed_attention, lib=_LIBRARY)
register_fakes(_LIBRARY)
differentiate_by_op(_LIBRARY, "latent_attention", 5)
differentiate_by_op(_LIBRARY, "expanded_attention", 6, by_what_is_asked=True)
differentiate_per_head_matmul(_LIBRARY)
for _device_type in ("cpu", "cuda"):
    _register_autocast(_device_type)
for _name in __all__:
    # torch accepts no autograd formula for an op that mutates its arguments.
    if _name not in ("append_latents", "expanded_attention", "latent_attention", "per_head_matmul"):
        refuse_to_differentiate(_LIBRARY, _name)

SEALED = torch.ops.mla.sealed_attention.default


def schema_of(op: str) -> str:
    """The arguments and results of `mla::<op>` as torch writes them."""
    return str(getattr(torch.ops.mla, op).default._schema).removeprefix(f"mla::{op}")
