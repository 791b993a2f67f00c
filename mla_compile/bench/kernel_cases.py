"""Problems for the attention ops alone: their tensors, and what a machine cannot avoid for them.

Decode reads a cache in pages of 64 tokens, sparse decode names 2,048 keys of it, prefill attends causally to its own
prompt. Sizes are DeepSeek's: L = 512, R = 64, P = V = 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mla_compile.fp8 import RowLayout

Kind = Literal["decode", "sparse", "prefill"]
L, R, P, V = 512, 64, 128, 128
PAGE = 64
TOPK = 2048
SCALE = (P + R) ** -0.5


@dataclass(frozen=True)
class Case:
    """One problem. Prefill has as many queries as tokens and no FP8."""

    kind: Kind
    B: int
    Sq: int
    T: int
    N: int
    fp8: bool = False
    workspace_tokens: int = 1024
    """Of our prefill: `mla.workspace_tokens`."""

    def __str__(self) -> str:
        return f"{self.kind} B={self.B} Sq={self.Sq} T={self.T} N={self.N} {'fp8' if self.fp8 else 'bf16'}"

    @property
    def keys(self) -> int:
        """Keys that a query attends to at most."""
        return min(TOPK, self.T) if self.kind == "sparse" else self.T

    @property
    def flops(self) -> float:
        """Of the way the op goes: absorbed for decode, up-projection and a causal triangle for prefill."""
        if self.kind == "prefill":
            pairs = self.T * (self.T + 1) / 2
            return 2.0 * self.B * self.N * (self.T * L * (P + V) + pairs * (P + R + V))
        return 2.0 * self.B * self.Sq * self.N * self.keys * (2 * L + R)

    def bytes(self, itemsize: int) -> float:
        """Everything that has to be read or written once: keys, queries, results, and the weights of a prefill."""
        if self.kind == "prefill":
            heads = self.B * self.T * self.N * (P + R + V) + self.N * (P + V) * L
            return float(itemsize * (heads + self.B * self.T * (L + R)))
        key = RowLayout(L, R, torch.bfloat16).row_bytes if self.fp8 else itemsize * (L + R)
        each = self.Sq if self.kind == "sparse" else 1
        return float(self.B * (each * self.keys * key + itemsize * self.Sq * self.N * (2 * L + R)))


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case. The pages of a sequence lie one behind the other, so that what reads no pages has them too."""

    case: Case
    q: Tensor
    """Absorbed, `[B, Sq, N, L + R]`; of a prefill `[B, Sq, N, P + R]`."""
    cache: Tensor
    """`[B, T, L + R]`"""
    rows: Tensor | None
    """The cache in FP8, `[pages, PAGE, row_bytes]`."""
    table: Tensor
    """`[B, pages of a sequence]`"""
    lengths: Tensor
    """`[B]`, all T."""
    indices: Tensor | None
    """Keys that each query names, `[B, Sq, keys]`."""
    weight: Tensor | None
    """Of a prefill, `[N, P + V, L]`."""

    @property
    def pages(self) -> Tensor:
        """`[pages, PAGE, L + R]`"""
        return self.cache.view(-1, PAGE, L + R)


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random tensors of unit variance. Raises ValueError if T is no multiple of the page size."""
    if case.T % PAGE:
        raise ValueError(f"expected a multiple of {PAGE} tokens, found {case.T}")
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    prefill, per_sequence = case.kind == "prefill", case.T // PAGE
    q = random(case.B, case.Sq, case.N, P + R if prefill else L + R)
    cache = random(case.B, case.T, L + R)
    pages: dict[str, Any] = {"dtype": torch.int32, "device": device}
    table = torch.arange(case.B * per_sequence, **pages).view(case.B, per_sequence)
    rows = indices = weight = None
    if case.fp8:
        layout = RowLayout(L, R, dtype)
        rows = torch.zeros((case.B * per_sequence, PAGE, layout.row_bytes), dtype=torch.uint8, device=device)
        tokens = cache.view(-1, L + R)
        torch.ops.mla.append_latents(tokens[:, :L], tokens[:, L:], torch.arange(len(tokens), device=device), rows)
    if case.kind == "sparse":
        order = torch.rand((case.B, case.Sq, case.T), generator=generator, device=device)
        indices = order.topk(case.keys).indices.int()
    if prefill:
        weight = random(case.N, P + V, L) / L**0.5
    return Inputs(case, q, cache, rows, table, torch.full((case.B,), case.T, **pages), indices, weight)
