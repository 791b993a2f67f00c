"""MLA as three people would write it in plain torch.

Each takes hidden states and its own cache, and returns the output and the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, N, L, P, R, V = 32, 4, 16, 12, 8, 10


def rope(x: Tensor, start: int | Tensor) -> Tensor:
    """Rotate `x` [B, S, H, R] by its positions from `start`."""
    frequency = 100.0 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angle = (start + torch.arange(x.shape[1]))[:, None, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Combined(nn.Module):
    """One `kv_b_proj`, SDPA, and a cache that grows by `cat`; with or without q-LoRA."""

    def __init__(self, q_lora: bool = False) -> None:
        super().__init__()
        q_width = N * (P + R)
        self.q_proj = (
            nn.Sequential(nn.Linear(HIDDEN, 24, bias=False), nn.RMSNorm(24), nn.Linear(24, q_width, bias=False))
            if q_lora
            else nn.Linear(HIDDEN, q_width, bias=False)
        )
        self.kv_a_proj = nn.Linear(HIDDEN, L + R, bias=False)
        self.kv_norm = nn.RMSNorm(L)
        self.kv_b_proj = nn.Linear(L, N * (P + V), bias=False)
        self.o_proj = nn.Linear(N * V, HIDDEN, bias=False)

    @staticmethod
    def empty_cache(batch: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch, 0, L, dtype=dtype), torch.zeros(batch, 0, R, dtype=dtype)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor], mask: Tensor | None = None) -> tuple[Tensor, tuple]:
        B, S, _ = x.shape
        start = cache[0].shape[1]
        q_nope, q_rope = self.q_proj(x).view(B, S, N, -1).split([P, R], dim=-1)
        latent, k_rope = self.kv_a_proj(x).split([L, R], dim=-1)
        latent = torch.cat([cache[0], self.kv_norm(latent)], dim=1)
        k_rope = torch.cat([cache[1], rope(k_rope[:, :, None], start)[:, :, 0]], dim=1)
        k_nope, v = self.kv_b_proj(latent).view(B, -1, N, P + V).transpose(1, 2).split([P, V], dim=-1)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
        q = torch.cat([q_nope, rope(q_rope, start)], dim=-1).transpose(1, 2)
        if mask is None and S > 1:
            mask = torch.ones(S, start + S, dtype=torch.bool).tril(start)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(o.transpose(1, 2).reshape(B, S, -1)), (latent, k_rope)


class Separate(nn.Module):
    """Separate `W_UK` and `W_UV`, einsum, a softmax by hand, and a buffer written with `index_copy_`."""

    LENGTH = 24

    def __init__(self) -> None:
        super().__init__()
        self.w_q = nn.Parameter(torch.randn(N, P + R, HIDDEN) / HIDDEN**0.5)
        self.w_dkv = nn.Parameter(torch.randn(L, HIDDEN) / HIDDEN**0.5)
        self.w_kr = nn.Parameter(torch.randn(R, HIDDEN) / HIDDEN**0.5)
        self.w_uk = nn.Parameter(torch.randn(N, P, L) / L**0.5)
        self.w_uv = nn.Parameter(torch.randn(N, V, L) / L**0.5)
        self.w_o = nn.Parameter(torch.randn(N, V, HIDDEN) / (N * V) ** 0.5)

    def empty_cache(self, batch: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        return {
            "latent": torch.zeros(batch, self.LENGTH, L, dtype=dtype),
            "k_rope": torch.zeros(batch, self.LENGTH, R, dtype=dtype),
            "length": torch.zeros((), dtype=torch.int64),
        }

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        S = x.shape[1]
        position = cache["length"] + torch.arange(S)
        cache["latent"].index_copy_(1, position, torch.einsum("bsh,lh->bsl", x, self.w_dkv))
        k_pe = rope(torch.einsum("bsh,rh->bsr", x, self.w_kr)[:, :, None], cache["length"])[:, :, 0]
        cache["k_rope"].index_copy_(1, position, k_pe)
        q = torch.einsum("bsh,ndh->bsnd", x, self.w_q)
        q = torch.cat([q[..., :P], rope(q[..., P:], cache["length"])], dim=-1)
        k_nope = torch.einsum("btl,npl->btnp", cache["latent"], self.w_uk)
        v = torch.einsum("btl,nvl->btnv", cache["latent"], self.w_uv)
        k = torch.cat([k_nope, cache["k_rope"][:, :, None].expand(-1, -1, N, -1)], dim=-1)
        scores = torch.einsum("bsnd,btnd->bnst", q, k) / (P + R) ** 0.5
        seen = torch.arange(self.LENGTH) <= position[:, None]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        o = torch.einsum("bnst,btnv->bsnv", weights, v)
        cache["length"] += S
        return torch.einsum("bsnv,nvh->bsh", o, self.w_o), cache


class Inference(nn.Module):
    """Like DeepSeek's own inference code: buffers written by slices, scores as sums of two products, softmax in fp32.

    `absorb` selects its second branch, which is absorbed by hand.
    """

    LENGTH = 24

    def __init__(self, absorb: bool = False) -> None:
        super().__init__()
        self.absorb = absorb
        self.wq = nn.Linear(HIDDEN, N * (P + R), bias=False)
        self.wkv_a = nn.Linear(HIDDEN, L + R, bias=False)
        self.kv_norm = nn.RMSNorm(L)
        self.wkv_b = nn.Linear(L, N * (P + V), bias=False)
        self.wo = nn.Linear(N * V, HIDDEN, bias=False)
        self.scale = (P + R) ** -0.5

    def empty_cache(self, batch: int, dtype: torch.dtype = torch.float32) -> dict[str, object]:
        kv = torch.zeros(batch, self.LENGTH, L, dtype=dtype)
        return {"kv": kv, "pe": torch.zeros(batch, self.LENGTH, R, dtype=dtype), "start": 0}

    def forward(self, x: Tensor, cache: dict) -> tuple[Tensor, dict]:
        B, S, _ = x.shape
        start, end = cache["start"], cache["start"] + S
        q_nope, q_pe = self.wq(x).view(B, S, N, P + R).split([P, R], dim=-1)
        kv, k_pe = self.wkv_a(x).split([L, R], dim=-1)
        q_pe, k_pe = rope(q_pe, start), rope(k_pe.unsqueeze(2), start).squeeze(2)
        cache["kv"][:B, start:end] = self.kv_norm(kv)
        cache["pe"][:B, start:end] = k_pe
        latent, pe = cache["kv"][:B, :end], cache["pe"][:B, :end]
        wkv_b = self.wkv_b.weight.view(N, -1, L)
        if self.absorb:
            q_latent = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, :P])
            scores = torch.einsum("bshc,btc->bsht", q_latent, latent)
        else:
            k_nope = torch.einsum("btc,hdc->bthd", latent, wkv_b[:, :P])
            scores = torch.einsum("bshd,bthd->bsht", q_nope, k_nope)
        scores = (scores + torch.einsum("bshr,btr->bsht", q_pe, pe)) * self.scale
        if S > 1:
            mask = torch.full((S, end), float("-inf"), dtype=x.dtype).triu_(start + 1)
            scores += mask.unsqueeze(1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
        if self.absorb:
            o = torch.einsum("bsht,btc->bshc", weights, latent)
            o = torch.einsum("bshc,hdc->bshd", o, wkv_b[:, -V:])
        else:
            v = torch.einsum("btc,hdc->bthd", latent, wkv_b[:, -V:])
            o = torch.einsum("bsht,bthd->bshd", weights, v)
        return self.wo(o.flatten(2)), cache | {"start": end}
