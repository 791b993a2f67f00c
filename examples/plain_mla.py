"""Multi-head Latent Attention as one would first write it, in plain torch, and what `backend="mla"` makes of it.

Run: python examples/plain_mla.py
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile


class NaiveMLA(nn.Module):
    """Caches one latent and one rope key per token, and expands all of them at every step."""

    def __init__(self, hidden: int = 1024, N: int = 16, L: int = 256, P: int = 64, R: int = 32, V: int = 64) -> None:
        super().__init__()
        self.N, self.L, self.P, self.R, self.V = N, L, P, R, V
        self.q_proj = nn.Linear(hidden, N * (P + R), bias=False)
        self.kv_a_proj = nn.Linear(hidden, L + R, bias=False)
        self.kv_norm = nn.RMSNorm(L)
        self.kv_b_proj = nn.Linear(L, N * (P + V), bias=False)
        self.o_proj = nn.Linear(N * V, hidden, bias=False)

    def rope(self, x: Tensor, start: int) -> Tensor:
        """Rotate pairs of `x` [B, S, H, R] by their positions from `start`."""
        frequency = 10000.0 ** (-torch.arange(0, self.R, 2, device=x.device) / self.R)
        angle = (start + torch.arange(x.shape[1], device=x.device))[:, None, None] * frequency
        a, b = x.chunk(2, dim=-1)
        rotated = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
        return rotated.to(x.dtype)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """`x` [B, S, hidden] after `past`: latents [B, T, L] and rope keys [B, T, R]."""
        B, S, _ = x.shape
        start = past[0].shape[1]
        q_nope, q_rope = self.q_proj(x).view(B, S, self.N, -1).split([self.P, self.R], dim=-1)
        latent, k_rope = self.kv_a_proj(x).split([self.L, self.R], dim=-1)
        latent = torch.cat([past[0], self.kv_norm(latent)], dim=1)
        k_rope = torch.cat([past[1], self.rope(k_rope[:, :, None], start)[:, :, 0]], dim=1)
        k_nope, v = self.kv_b_proj(latent).view(B, -1, self.N, self.P + self.V).split([self.P, self.V], dim=-1)
        k = torch.cat([k_nope, k_rope[:, :, None].expand(-1, -1, self.N, -1)], dim=-1)
        q = torch.cat([q_nope, self.rope(q_rope, start)], dim=-1)
        mask = torch.ones(S, start + S, dtype=torch.bool, device=x.device).tril(start) if S > 1 else None
        o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask)
        return self.o_proj(o.transpose(1, 2).reshape(B, S, -1)), (latent, k_rope)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    layer = NaiveMLA()
    past = torch.randn(1, 4096, layer.L), torch.randn(1, 4096, layer.R)
    x = torch.randn(1, 1, 1024)
    expected, _ = layer(x, past)
    compiled = torch.compile(layer, backend="mla")
    for name, run in (("eager", layer), ("mla", compiled)):
        run(x, past)
        start = time.perf_counter()
        output, _ = run(x, past)
        error = (output - expected).abs().max().item()
        print(f"{name:6} {1e3 * (time.perf_counter() - start):7.1f} ms   difference to eager {error:.1e}")
    print(mla_compile.last_report())


if __name__ == "__main__":
    main()
