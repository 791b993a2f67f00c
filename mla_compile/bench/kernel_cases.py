"""Cases for the attention ops alone: their tensors, and the FLOPs and bytes that no machine can avoid.

Decode reads a cache in pages of 64 tokens, sparse decode reads 2,048 named keys of it, prefill attends causally to its
own prompt, and train is that and its gradients. Sizes are DeepSeek's: L = 512, R = 64, P = V = 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mla_compile.fp8 import RowLayout

Kind = Literal["decode", "sparse", "prefill", "train"]
L, R, P, V = 512, 64, 128, 128
PAGE = 64
TOPK = 2048
SCALE = (P + R) ** -0.5


@dataclass(frozen=True)
class Case:
    """One case. Prefill and train have as many queries as tokens, and no FP8."""

    kind: Kind
    B: int
    Sq: int
    T: int
    N: int
    fp8: bool = False
    workspace_tokens: int = 1024
    """`mla.workspace_tokens` of our prefill."""

    def __str__(self) -> str:
        return f"{self.kind} B={self.B} Sq={self.Sq} T={self.T} N={self.N} {'fp8' if self.fp8 else 'bf16'}"

    @property
    def of_prompts(self) -> bool:
        """Whether all tokens are queries, and keys and values are up-projected."""
        return self.kind in ("prefill", "train")

    @property
    def keys(self) -> int:
        """The largest number of keys that a query attends to."""
        return min(TOPK, self.T) if self.kind == "sparse" else self.T

    @property
    def flops(self) -> float:
        """The FLOPs of the op: absorbed for decode, up-projection and a causal triangle for prefill.

        Gradients of an up-projection are two products, those of attention are four, beside scores that are computed
        again.
        """
        if self.of_prompts:
            expansions, scores, sums = (3, 4, 3) if self.kind == "train" else (1, 1, 1)
            pairs = self.T * (self.T + 1) / 2
            return 2.0 * self.B * self.N * (expansions * self.T * L * (P + V) + pairs * (scores * (P + R) + sums * V))
        return 2.0 * self.B * self.Sq * self.N * self.keys * (2 * L + R)

    def bytes(self, itemsize: int) -> float:
        """The bytes that have to be read or written once: keys, queries, results, for prefill also the weights, and for
        train the gradients of all of these."""
        if self.of_prompts:
            heads = self.B * self.T * self.N * (P + R + V) + self.N * (P + V) * L
            return float((1 + (self.kind == "train")) * itemsize * (heads + self.B * self.T * (L + R)))
        key = RowLayout(L, R, torch.bfloat16).row_bytes if self.fp8 else itemsize * (L + R)
        each = self.Sq if self.kind == "sparse" else 1
        return float(self.B * (each * self.keys * key + itemsize * self.Sq * self.N * (2 * L + R)))


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case. A sequence's pages are consecutive, so that peers without paging can read them too."""

    case: Case
    q: Tensor
    """Absorbed queries `[B, Sq, N, L + R]`; for prefill and train, queries `[B, Sq, N, P + R]`."""
    cache: Tensor
    """`[B, T, L + R]`"""
    rows: Tensor | None
    """The cache in FP8, `[pages, PAGE, row_bytes]`."""
    table: Tensor
    """The block table, `[B, pages of a sequence]`."""
    lengths: Tensor
    """`[B]`, all T."""
    indices: Tensor | None
    """The keys that each query names, `[B, Sq, keys]`; for sparse decode only."""
    weight: Tensor | None
    """The up-projection `[N, P + V, L]`; for prefill and train only."""
    direction: Tensor | None = None
    """The gradient of the result, `[B, Sq, N, V]`; for train only."""

    @property
    def pages(self) -> Tensor:
        """`[pages, PAGE, L + R]`"""
        return self.cache.view(-1, PAGE, L + R)


def make_inputs(case: Case, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Make random tensors of unit variance. Raises ValueError if T is not a multiple of the page size."""
    if case.T % PAGE:
        raise ValueError(f"expected a multiple of {PAGE} tokens, found {case.T}")
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    per_sequence = case.T // PAGE
    q = random(case.B, case.Sq, case.N, P + R if case.of_prompts else L + R)
    cache = random(case.B, case.T, L + R)
    pages: dict[str, Any] = {"dtype": torch.int32, "device": device}
    table = torch.arange(case.B * per_sequence, **pages).view(case.B, per_sequence)
    rows = indices = weight = direction = None
    if case.fp8:
        layout = RowLayout(L, R, dtype)
        rows = torch.zeros((case.B * per_sequence, PAGE, layout.row_bytes), dtype=torch.uint8, device=device)
        tokens = cache.view(-1, L + R)
        torch.ops.mla.append_latents(tokens[:, :L], tokens[:, L:], torch.arange(len(tokens), device=device), rows)
    if case.kind == "sparse":
        order = torch.rand((case.B, case.Sq, case.T), generator=generator, device=device)
        indices = order.topk(case.keys).indices.int()
    if case.of_prompts:
        weight = random(case.N, P + V, L) / L**0.5
    if case.kind == "train":
        direction = random(case.B, case.Sq, case.N, V)
    return Inputs(case, q, cache, rows, table, torch.full((case.B,), case.T, **pages), indices, weight, direction)
