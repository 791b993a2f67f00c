"""MLA written the naive way, independent of the library: exact in float64; in a test's dtype, the measure of error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Case = tuple[Tensor | None, int | None]
"""A mask and a causal offset."""


def masks(batch: int, heads: int, queries: int, keys: int) -> dict[str, Case]:
    """One case for each meaning that a mask can have; the queries are the last of the keys' tokens."""
    context = keys - queries
    lengths = torch.arange(1, batch + 1)[:, None, None, None] * keys // batch
    padding = torch.arange(keys) < lengths
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(context)[None, None]
    bias = torch.randn(1, heads, queries, keys)
    return {
        "none": (None, None),
        "causal": (None, context),
        "causal, first queries see nothing": (None, -min(2, queries)),
        "causal, last keys unseen": (None, max(context - 3, 0)),
        "right padding": (padding, None),
        "left padding and causal": (padding.flip(3), context),
        "causal as bool": (causal & padding, None),
        "window": (causal & ~causal.roll(-3, 3), None),
        "scattered keys": (torch.rand(1, 1, 1, keys) < 0.3, None),
        "bool of each head and query": (torch.rand(batch, heads, queries, keys) < 0.5, None),
        "some rows hidden": ((torch.rand(batch, 1, queries, 1) < 0.5).expand(-1, -1, -1, keys), None),
        "one value for all keys": (torch.rand(batch, 1, 1, 1) < 0.5, None),
        "all hidden": (torch.zeros(1, 1, 1, keys, dtype=torch.bool), None),
        "bias": (bias, None),
        "bias and causal": (bias[:, :1], context),
        "bias of -inf": (bias.masked_fill(~causal, -torch.inf).masked_fill(bias > 2, -torch.inf), None),
        "bias of finfo.min": (torch.where(causal, 0.0, torch.finfo(torch.float32).min), None),
    }


MASKS = tuple(masks(1, 1, 1, 1))
"""The names of the masks."""


def case_of(sizes: tuple[int, ...], mask: str, dtype: torch.dtype = torch.float32) -> Case:
    """The case of a mask for sizes `B, Sq, T, N, ...`; what is added to scores in a dtype, where -inf alone is -inf."""
    tensor, causal_offset = masks(sizes[0], sizes[3], sizes[1], sizes[2])[mask]
    if tensor is not None and tensor.is_floating_point():
        tensor = torch.where(tensor.isneginf(), tensor, tensor.clamp(min=torch.finfo(dtype).min)).to(dtype)
    return tensor, causal_offset


@dataclass(frozen=True)
class Inputs:
    """q `[B, Sq, N, P + R]`, latent `[B, T, L]`, k_rope `[B, T, R]` or `[B, T, N, R]`, w_uk `[N, P, L]`,
    w_uv `[N, V, L]`, scale. With two latents side by side, each weight has the columns of its own."""

    q: Tensor
    latent: Tensor
    k_rope: Tensor
    w_uk: Tensor
    w_uv: Tensor
    scale: float

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that `mla::expanded_attention` takes, in its order."""
        return self.q, self.latent, self.k_rope, self.w_uk, self.w_uv

    @property
    def absorbed(self) -> tuple[Tensor, ...]:
        """The tensors that `mla::latent_attention` takes, in its order."""
        q_nope, q_rope = self.q.split([self.w_uk.shape[1], self.k_rope.shape[2]], dim=-1)
        return torch.einsum("bsnp,npl->bsnl", q_nope, self.w_uk), q_rope, self.latent, self.k_rope

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        return Inputs(*map(change, self.tensors), self.scale)

    def with_own_ropes(self) -> Inputs:
        """The same, but every head has rope keys of its own."""
        batch, keys, rope = self.k_rope.shape
        return replace(self, k_rope=torch.randn(batch, keys, self.q.shape[2], rope).to(self.k_rope.dtype))

    def with_two_latents(self, of_keys: int) -> Inputs:
        """The same, but keys come from the first columns of the latent, and values from the others."""
        return replace(self, w_uk=self.w_uk[..., :of_keys], w_uv=self.w_uv[..., of_keys:])

    @property
    def latents(self) -> tuple[Tensor, Tensor]:
        """The latents of the keys and of the values."""
        of_keys, of_values = self.w_uk.shape[2], self.w_uv.shape[2]
        return self.latent[..., :of_keys], self.latent[..., -of_values:]


def make_inputs(sizes: tuple[int, int, int, int, int, int, int, int], dtype: torch.dtype = torch.float32) -> Inputs:
    """Inputs for `B, Sq, T, N, L, P, R, V`: slices of one projection, one cache and one weight, as in a model."""
    batch, queries, keys, heads, rank, nope, rope, value = sizes
    q = torch.randn(batch, heads, queries, nope + rope, dtype=dtype).transpose(1, 2)
    cache = torch.randn(batch, keys, rank + rope, dtype=dtype)
    weight = torch.randn(heads, nope + value, rank, dtype=dtype) / rank**0.5
    return Inputs(q, cache[..., :rank], cache[..., rank:], weight[:, :nope], weight[:, nope:], (nope + rope) ** -0.5)


def naive_mla(x: Inputs, case: Case) -> tuple[Tensor, Tensor]:
    """o `[B, Sq, N, V]`, lse `[B, Sq, N]`: all keys and values are up-projected, softmax is in at least float32."""
    mask, causal_offset = case
    rope = x.k_rope[:, None] if x.k_rope.dim() == 3 else x.k_rope.transpose(1, 2)
    of_keys, of_values = x.latents
    k = torch.cat([of_keys[:, None] @ x.w_uk.mT, rope.expand(-1, x.w_uk.shape[0], -1, -1)], dim=-1)
    v = of_values[:, None] @ x.w_uv.mT
    scores = x.q.transpose(1, 2) @ k.mT * x.scale
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    if causal_offset is not None:
        positions = torch.arange(x.q.shape[1])[:, None] + causal_offset - torch.arange(x.latent.shape[1])
        scores = torch.where(positions >= 0, scores, -torch.inf)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    weights = torch.softmax(scores, dim=-1).where((scores > -torch.inf).any(-1, keepdim=True), 0.0)
    o = weights.to(v.dtype) @ v
    return o.transpose(1, 2), torch.logsumexp(scores, dim=-1).transpose(1, 2)
