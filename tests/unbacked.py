"""Attention to a part of a cache that an integer tensor selects: sizes that are known only at run time."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from tests.models import HIDDEN, L, N, P, R, V


class Attention(nn.Module):
    """Queries of `x` [B, S, HIDDEN] attend to a cache [B, T, L + R], after `take` selected parts of both.

    `take` gets both and a number, and returns the selected parts, and perhaps a mask of the keys.
    """

    def __init__(self, take):
        super().__init__()
        self.take = take
        self.q_proj = nn.Linear(HIDDEN, N * (P + R), bias=False)
        self.kv_b_proj = nn.Linear(L, N * (P + V), bias=False)

    def forward(self, x, cache, number):
        x, cache, *mask = self.take(x, cache, number)
        q = self.q_proj(x).unflatten(-1, (N, P + R)).transpose(1, 2)
        latent, k_rope = cache.split([L, R], dim=-1)
        k_nope, v = self.kv_b_proj(latent).unflatten(-1, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
        return scaled_dot_product_attention(q, k, v, *mask)


def first(x, cache, number):
    length = number.item()
    torch._check(length >= 1)
    torch._check(length <= cache.shape[1])
    return x, cache[:, :length]


def from_one_on(x, cache, number):
    start = number.item()
    torch._check(start >= 0)
    torch._check(start < cache.shape[1])
    return x, cache[:, start:]


def more(x, cache, number):
    count = number.item()
    torch._check(count >= 0)
    return x, torch.cat([cache, cache.new_ones(cache.shape[0], count, L + R)], dim=1)


def some_keys(x, cache, number):
    return x, cache[:, (torch.arange(cache.shape[1]) % number != 0).nonzero()[:, 0]]


def some_queries(x, cache, number):
    return x[:, (torch.arange(x.shape[1]) < number).nonzero()[:, 0]], cache
