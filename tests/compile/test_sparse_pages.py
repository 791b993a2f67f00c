"""A compiled decode step like DeepSeek-V3.2's, over a naive cache in pages: the chosen keys are read in the pool."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import mla_compile
from tests.errors import assert_as_close_as_eager

B, N, L, P, R, V, TOPK, PAGES, PAGE_SIZE = 2, 4, 32, 16, 8, 16, 16, 400, 16


def step(
    q: Tensor, pool: Tensor, table: Tensor, weight: Tensor, scores: Tensor, new: Tensor, slots: Tensor, lengths: Tensor
) -> Tensor:
    pool.view(-1, L + R).index_copy_(0, slots, new)
    latent, k_rope = pool[table].flatten(1, 2).split([L, R], dim=-1)
    k_nope, v = (latent @ weight.T).unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
    named = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(TOPK).indices, True)
    named = named & (torch.arange(scores.shape[-1]) < lengths[:, None, None])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=named[:, None])


def test_the_pool_is_read_where_it_is() -> None:
    table = torch.randperm(PAGES)[: B * 64].view(B, 64)
    numbers = torch.randn(B, N, 1, P + R), torch.randn(PAGES, PAGE_SIZE, L + R), torch.randn(N * (P + V), L) / L**0.5
    lengths = torch.tensor([900, 1000])
    slots = table[torch.arange(B), (lengths - 1) // PAGE_SIZE] * PAGE_SIZE + (lengths - 1) % PAGE_SIZE
    scores, new = torch.randn(B, 1, 64 * PAGE_SIZE), torch.randn(B, L + R)

    def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, pool, weight = (tensor.to(dtype, copy=True) for tensor in numbers)
        return q, pool, table, weight, scores, new.to(dtype), slots, lengths

    exact, eager = step(*inputs(torch.float64)), step(*inputs(torch.float32))
    compiled = torch.compile(step, backend="mla", fullgraph=True)
    own = inputs(torch.float32)
    output, (code,) = run_and_get_code(compiled, *own)
    (site,) = mla_compile.last_report().sites
    assert site.path == "sparse"
    assert site.reason.endswith("reads the pages")
    assert f"empty_strided_cpu(({PAGES}" not in code
    assert f", (1, {PAGES * PAGE_SIZE}, {L}), ({PAGES * PAGE_SIZE * (L + R)}, {L + R}, 1), 0)" in code
    assert_as_close_as_eager(output, eager, exact)
    assert torch.equal(own[1].view(-1, L + R)[slots], new)
