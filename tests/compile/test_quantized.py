"""An up-projection that is kept in 8 bits: for one query, generated code reads it in 8 bits, without a wider copy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import mla_compile
from tests.errors import assert_as_close_as_eager

HIDDEN, N, L, P, R, V, T = 24, 4, 16, 8, 4, 8, 20


class WeightOnly(nn.Module):
    """A Linear without bias, with int8 weights and a scale for each output."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (outer, inner), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(outer) / (64 * inner**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.kv_b_proj = WeightOnly(HIDDEN, N * (P + R)), WeightOnly(L, N * (P + V))

    def forward(self, x: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (N, P + R)).transpose(1, 2)
        k_nope, v = self.kv_b_proj(latent).unflatten(-1, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("queries", [1, 3])
def test_eight_bits_are_read_as_eight_bits(queries: int) -> None:
    layer, x = Attention(), torch.randn(1, queries, HIDDEN)
    latent, k_rope = torch.randn(1, T, L), torch.randn(1, T, R)
    eager = layer(x, latent, k_rope)
    exact = layer(x.double(), latent.double(), k_rope.double())
    compiled = torch.compile(layer, backend="mla", options={"mla.path": "absorbed"}, fullgraph=True)
    output, (code,) = run_and_get_code(compiled, x, latent, k_rope)
    assert_as_close_as_eager(output, eager, exact)
    (site,) = mla_compile.last_report().sites
    assert site.path == "absorbed"
    assert ("mla.per_head_matmul" in code) == (queries > 1)
