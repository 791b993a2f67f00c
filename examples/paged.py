"""A paged latent cache in plain torch: sequences of unequal lengths, written in place and read with `pages[table]`.

Compiled, nothing is gathered or up-projected: attention reads the pool.

Run: python examples/paged.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from mla_compile import BlockTable, PagePool
from mla_compile.cache import stack


class PagedMLA(nn.Module):
    """One decode step of a batch; rope is left out."""

    def __init__(self, hidden: int = 256, N: int = 8, L: int = 64, P: int = 32, R: int = 16, V: int = 32) -> None:
        super().__init__()
        self.N, self.L, self.P, self.R, self.V = N, L, P, R, V
        self.q_proj = nn.Linear(hidden, N * (P + R), bias=False)
        self.kv_a_proj = nn.Linear(hidden, L + R, bias=False)
        self.kv_b_proj = nn.Linear(L, N * (P + V), bias=False)
        self.o_proj = nn.Linear(N * V, hidden, bias=False)

    def forward(self, x: Tensor, pages: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        """`x` [B, 1, hidden] is the last token of each sequence, which is written to its page.

        A sequence has `lengths` [B] tokens in the `pages` [pages, size, L + R] that its row of `table` [B, n] names.
        """
        B, size = x.shape[0], pages.shape[1]
        q = self.q_proj(x).view(B, 1, self.N, -1).transpose(1, 2)
        last = lengths - 1
        pages[table[torch.arange(B, device=x.device), last // size], last % size] = self.kv_a_proj(x)[:, 0]
        latent, k_rope = pages[table].flatten(1, 2).split([self.L, self.R], dim=-1)
        k_nope, v = self.kv_b_proj(latent).view(B, -1, self.N, self.P + self.V).split([self.P, self.V], dim=-1)
        k = torch.cat([k_nope, k_rope[:, :, None].expand(-1, -1, self.N, -1)], dim=-1)
        seen = torch.arange(k.shape[1], device=x.device) < lengths[:, None, None, None]
        o = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen)
        return self.o_proj(o.transpose(1, 2).reshape(B, 1, -1))


def sequences(pool: PagePool, lengths: list[int]) -> list[BlockTable]:
    """Sequences of these lengths, with random numbers in their pages."""
    tables = []
    for length in lengths:
        table = BlockTable(pool, batch=1)
        table.extend(length)
        table.write(0, torch.randn(1, length, pool.latent_width + pool.rope_width, device=pool.device))
        tables.append(table)
    return tables


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    layer = PagedMLA()
    compiled = torch.compile(layer, backend="mla")
    pool = PagePool(1, layer.L, layer.R, pages=4096, page_size=16)
    tables = sequences(pool, [300, 45, 170])
    for _ in range(3):
        for table in tables:
            table.extend(1)
        block_table, lengths = stack(tables)
        x = torch.randn(3, 1, 256)
        expected = layer(x, pool.layers[0], block_table, lengths)
        error = (compiled(x, pool.layers[0], block_table, lengths) - expected).abs().max().item()
        print(f"lengths {lengths.tolist()}   difference to eager {error:.1e}")
    print(mla_compile.last_report())


if __name__ == "__main__":
    main()
