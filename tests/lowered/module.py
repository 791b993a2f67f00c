"""A `Program` in plain torch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .choices import PAGE_SIZE, Program, dims

HIDDEN, WINDOW, NAMED = 16, 5, 4
FP8 = torch.float8_e4m3fn
PAGES = 3
"""Pages of the pool for each entry of the table."""


class Layer(nn.Module):
    """One attention with its projections, over keys that are given or to which new ones are appended."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.p = p = program
        self.q_proj = nn.Linear(HIDDEN, p.heads * (p.nope + p.rope), bias=False)
        self.kv_a_proj = nn.Linear(HIDDEN, p.rank + p.rope, bias=False)
        if p.weights == "together":
            self.kv_b_proj = nn.Linear(p.rank, p.heads * (p.nope + p.value), bias=False)
        else:
            self.w_uk = nn.Parameter(torch.randn(p.heads, p.nope, p.rank) / p.rank**0.5)
            self.w_uv = nn.Parameter(torch.randn(p.heads, p.value, p.rank) / p.rank**0.5)
        self.o_proj = nn.Linear(p.heads * p.value, HIDDEN, bias=False)

    def forward(self, x: Tensor, cache: tuple[Tensor, ...], mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Hidden states and the cache of all tokens, which is given as `[B, T, L + R]` or in its two parts."""
        p = self.p
        if p.cache == "grown":
            cache = (torch.cat([cache[0], self.kv_a_proj(x)], dim=1),)
        latent, k_rope = cache if len(cache) == 2 else cache[0].split([p.rank, p.rope], dim=-1)
        q = self.q_proj(x).unflatten(2, (p.heads, -1)).transpose(1, 2)
        if p.weights == "together":
            heads = self.kv_b_proj(latent).unflatten(2, (p.heads, -1)).transpose(1, 2)
            k, v = heads.split([p.nope, p.value], dim=-1)
        else:
            k = torch.einsum("btl,npl->bntp", latent, self.w_uk)
            v = torch.einsum("btl,nvl->bntv", latent, self.w_uv)
        if p.rope:
            k = torch.cat([k, k_rope[:, None].expand(-1, p.heads, -1, -1)], dim=-1)
        seen = self.seen(q.shape[2], k.shape[2])
        mask = mask if seen is None else seen if mask is None else seen & mask
        if p.softmax == "sdpa":
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.mT / math.sqrt(p.nope + p.rope)
            if mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, -torch.inf)
            elif mask is not None:
                scores = scores + mask
            o = scores.softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype) @ v
        return self.o_proj(o.transpose(1, 2).flatten(2)), cache[0]

    def seen(self, queries: int, tokens: int) -> Tensor | None:
        if self.p.mask not in ("causal", "window"):
            return None
        seen = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
        if self.p.mask == "window":
            seen = seen & torch.ones(queries, tokens, dtype=torch.bool).triu(tokens - queries - WINDOW + 1)
        return seen


class Model(nn.Module):
    """`x [B, Sq, HIDDEN]`, the cache, and what the mask is made of; gives hidden states and each grown cache."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.p = program
        self.layers = nn.ModuleList(Layer(program) for _ in range(program.layers))

    def forward(self, x: Tensor, cache: tuple[Tensor, ...], more: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outputs = []
        keys, lengths = self.read(cache)
        mask = self.mask(x, keys[0], lengths, more)
        for layer in self.layers:
            x, grown = layer(x, keys, mask)
            if self.p.cache == "grown":
                outputs.append(grown)
        return x, *outputs

    def read(self, cache: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What a `Layer` takes as its cache, and how many keys each sequence has."""
        if "pages" not in self.p.cache:
            return cache, None
        *pools, table, lengths = cache
        if self.p.cache == "pages":
            return (pools[0][table].flatten(1, 2),), lengths
        pages, scales, rope = pools
        latent = pages[table].to(scales.dtype) * scales[table]
        return (latent.flatten(1, 2).to(rope.dtype), rope[table].flatten(1, 2)), lengths

    def mask(self, x: Tensor, keys: Tensor, lengths: Tensor | None, more: tuple[Tensor, ...]) -> Tensor | None:
        positions = torch.arange(keys.shape[1])
        seen = None if lengths is None else (positions < lengths[:, None])[:, None, None]
        match self.p.mask:
            case "causal lengths":
                last = lengths[:, None] - x.shape[1] + torch.arange(x.shape[1])
                return (positions <= last[..., None])[:, None]
            case "named":
                named = torch.zeros_like(more[0], dtype=torch.bool)
                named = named.scatter(-1, more[0].topk(NAMED).indices, True)[:, None]
                return named if seen is None else named & seen
            case "bool" | "additive" | "of keys":
                return more[0]
        return seen


def inputs(program: Program, sizes: tuple[int, int, int], generator: torch.Generator) -> tuple[Any, ...]:
    """What a `Model` takes: float64, except for FP8 numbers, their scales, bools and integers."""
    p, (batch, queries, tokens) = program, sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    more: tuple[Tensor, ...] = ()
    if "pages" in p.cache:
        count = PAGES * p.tokens[1] * p.batch[1]
        table = torch.randperm(count, generator=generator)[: batch * tokens].view(batch, tokens)
        lengths = torch.randint(1, tokens * PAGE_SIZE + 1, (batch,), generator=generator).clamp(min=queries)
        lengths[0] = max(tokens * PAGE_SIZE, queries)
        pool = normal(count, PAGE_SIZE, p.rank + p.rope)
        pools: tuple[Tensor, ...] = (pool,)
        if p.cache == "fp8 pages":
            scales = torch.rand(count, PAGE_SIZE, 1, generator=generator)
            pools = (pool[..., : p.rank].to(FP8), scales, pool[..., p.rank :].contiguous())
        cache, tokens = (*pools, table, lengths), tokens * PAGE_SIZE
    else:
        cache = (normal(batch, tokens, p.rank + p.rope),)
    match p.mask:
        case "named":
            more = (torch.rand(batch, queries, tokens, generator=generator, dtype=torch.float64),)
            if "pages" in p.cache:  # a query that names none of its sequence's keys would be NaN in plain torch
                lengths.fill_(tokens)
        case "additive":
            more = (normal(batch, 1, queries, tokens),)
        case "bool":
            keep = torch.rand(batch, 1, queries, tokens, generator=generator) < 0.6
            keep[..., 0] = True
            more = (keep,)
        case "of keys":
            keep = torch.rand(batch, 1, 1, tokens, generator=generator) < 0.6
            keep[..., -1] = True
            more = (keep,)
    return normal(batch, queries, HIDDEN), cache, more


def dynamic_shapes(program: Program) -> dict[str, Any]:
    """The argument of `torch.export.export` of that name, for what `inputs` gives."""
    p, of = program, dims(program)
    batch, queries, tokens = of["B"], of["Sq"], of["T"]
    more: tuple[Any, ...] = ()
    keys = tokens if "pages" not in p.cache or p.tokens[0] == p.tokens[1] else PAGE_SIZE * tokens
    match p.mask:
        case "named":
            more = ({0: batch, 1: queries, 2: keys},)
        case "additive" | "bool":
            more = ({0: batch, 2: queries, 3: keys},)
        case "of keys":
            more = ({0: batch, 3: keys},)
    if "pages" in p.cache:
        pools: tuple[Any, ...] = ({},) if p.cache == "pages" else ({}, {}, {})
        cache: tuple[Any, ...] = (*pools, {0: batch, 1: tokens}, {0: batch})
    else:
        cache = ({0: batch, 1: tokens},)
    return {"x": {0: batch, 1: queries}, "cache": cache, "more": more}
