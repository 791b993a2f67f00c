"""Scores with a product of something that each query has with each key, as an embedding of their distance."""

import math

import pytest
import torch
from torch import nn

import mla_compile

N, L, P = 4, 16, 16
pytestmark = pytest.mark.usefixtures("without_codegen")


class Relative(nn.Module):
    """MLA with relative keys: `score[n, i, j] = q[n, i] (k[n, j] + embedding[j - i])`."""

    def __init__(self):
        super().__init__()
        self.q, self.down = nn.Linear(N * P, N * P, bias=False), nn.Linear(N * P, L, bias=False)
        self.up = nn.Linear(L, 2 * N * P, bias=False)
        self.embedding = nn.Embedding(17, P)

    def forward(self, x):
        tokens = x.shape[1]
        q = self.q(x).unflatten(2, (N, P)).transpose(1, 2)
        k, v = self.up(self.down(x)).unflatten(2, (N, 2 * P)).transpose(1, 2).chunk(2, dim=-1)
        distance = torch.arange(tokens) - torch.arange(tokens)[:, None]
        relative = self.embedding(distance.clamp(-8, 8) + 8)
        scores = (q @ k.mT + torch.einsum("bnid,ijd->bnij", q, relative)) * P**-0.5
        weights = scores.masked_fill(distance > 0, -math.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


def test_attention_is_rewritten_without_gradients():
    module, x = Relative().double(), torch.randn(2, 9, N * P, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(module, backend="mla")(x), module(x))
    (site,) = mla_compile.last_report().sites
    assert site.rewritten


def test_attention_is_left_where_keys_would_be_up_projected_for_each_query():
    module, x = Relative(), torch.randn(2, 9, N * P)
    with torch.enable_grad():
        torch.compile(module, backend="mla")(x).sum().backward()
    (site,) = mla_compile.last_report().sites
    assert not site.rewritten
    assert site.reason.startswith("expected rope keys that many queries share, found some that differ between queries")
