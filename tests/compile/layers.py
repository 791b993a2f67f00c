"""MLA layers for tests of training, and the checks that these tests share."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

from mla_compile.inductor.interpreted import interpreted
from tests.models import HIDDEN, Combined, N, P, R, V, rope
from tests.training import assert_every_gradient

expanded_attention = torch.ops.mla.expanded_attention.default
stock = functools.partial(compile_fx, inner_compile=interpreted)
"""Stock Inductor without code generation, for tests that use `without_codegen`. What a forward keeps for its backward
is decided before that."""


class Layer(nn.Module):
    """MLA over a whole sequence. Subclasses override what their tests vary."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.mla = Combined()
        self.__dict__.update(settings)

    def up_projected(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        kv = self.mla.kv_b_proj(latent).unflatten(2, (N, P + V)).transpose(1, 2)
        return kv.split([P, V], dim=-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = self.mla.kv_a_proj(x).split([self.mla.kv_norm.normalized_shape[0], R], dim=-1)
        return self.mla.kv_norm(latent), k_rope

    def queries(self, x: Tensor) -> Tensor:
        """`[B, S, N, P + R]`, before rope."""
        return self.mla.q_proj(x).unflatten(2, (N, P + R))

    def forward(self, x: Tensor) -> Tensor:
        q_nope, q_rope = self.queries(x).split([P, R], dim=-1)
        q = torch.cat([q_nope, rope(q_rope, 0)], dim=-1).transpose(1, 2)
        latent, k_rope = self.latents(x)
        k_rope = rope(k_rope[:, :, None], 0).transpose(1, 2)
        k_nope, v = self.up_projected(latent)
        k = torch.cat([k_nope, k_rope.expand(-1, N, -1, -1)], dim=-1)
        return self.mla.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


def hidden(dtype=torch.float32, tokens=13):
    return torch.randn(2, tokens, HIDDEN, dtype=dtype)


def assert_trained(module, x, rewritten, *, autocast=False, outcomes=1):
    """Check output and gradients against float64, and that `rewritten` of `outcomes` attentions were rewritten."""
    compiled = assert_every_gradient(module, [x], autocast=autocast)
    assert len(compiled.outcomes) == outcomes
    assert sum(outcome.rewritten for outcome in compiled.outcomes) == rewritten
    assert len(compiled.nodes(expanded_attention)) == rewritten
    return compiled


class ByHand(Layer):
    """A softmax of masked scores, written out."""

    def attend(self, q, k, v):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return scores.masked_fill(mask, float("-inf")).softmax(-1) @ v


class DetachedKeys(Layer):
    """Keys are detached, so gradients are not those of the algebra."""

    def up_projected(self, latent):
        k, v = super().up_projected(latent)
        return k.detach(), v


class OneByOne(Layer):
    """Writes the output of one sequence after the other into a buffer."""

    def attend(self, q, k, v):
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        o = torch.empty_like(v)
        for b in range(o.shape[0]):
            o[b] = weights[b] @ self.values(v[b])
        return o

    def values(self, v):
        return v
