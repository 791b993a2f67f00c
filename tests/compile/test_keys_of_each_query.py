"""Scores with a product of something of each query and key: an embedding of their distance, what is known of a pair."""

import math

import pytest
import torch
from torch import nn

import mla_compile

N, L, P = 4, 16, 16
pytestmark = pytest.mark.usefixtures("without_codegen")


class Mla(nn.Module):
    """MLA with causal scores, to which `product` adds something."""

    def __init__(self):
        super().__init__()
        self.q, self.down = nn.Linear(N * P, N * P, bias=False), nn.Linear(N * P, L, bias=False)
        self.up = nn.Linear(L, 2 * N * P, bias=False)

    def forward(self, x, *cached):
        latent = torch.cat([*cached, self.down(x)], dim=1)
        q = self.q(x).unflatten(2, (N, P)).transpose(1, 2)
        k, v = self.up(latent).unflatten(2, (N, 2 * P)).transpose(1, 2).chunk(2, dim=-1)
        positions = torch.arange(latent.shape[1])
        distance = positions - positions[-x.shape[1] :, None]
        scores = (q @ k.mT + self.product(q, x, distance)) * P**-0.5
        weights = scores.masked_fill(distance > 0, -math.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Relative(Mla):
    """Shaw's relative keys: `score[n, i, j] = q[n, i] (k[n, j] + embedding[j - i])`."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(17, P)

    def product(self, q, x, distance):
        return torch.einsum("bnid,ijd->bnij", q, self.embedding(distance.clamp(-8, 8) + 8))


class Pairs(Mla):
    """A number for each head of each pair of tokens, from what is known of the pair."""

    def __init__(self):
        super().__init__()
        self.of_pairs = nn.Linear(N * P, N, bias=False)

    def product(self, q, x, distance):
        return self.of_pairs((x[:, :, None] - x[:, None]).abs()).permute(0, 3, 1, 2)


MODULES = pytest.mark.parametrize("module", [Relative, Pairs])


@MODULES
@pytest.mark.parametrize("path", ["absorbed", "chunked"])
def test_it_is_added_to_the_scores(module, path):
    module, x = module().double(), torch.randn(2, 9, N * P, dtype=torch.float64)
    compiled = torch.compile(module, backend="mla", options={"mla.path": path})
    torch.testing.assert_close(compiled(x), module(x))
    (site,) = mla_compile.last_report().sites
    assert (site.path, site.shapes["Sq"], site.mask) == (path, "9", "causal + keys of queries")


def test_a_single_query_has_rope_keys_like_any_other():
    module, x = Relative().double(), torch.randn(2, 1, N * P, dtype=torch.float64)
    cached = torch.randn(2, 8, L, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(module, backend="mla")(x, cached), module(x, cached))
    (site,) = mla_compile.last_report().sites
    assert (site.path, site.shapes["R"], site.mask) == ("absorbed", str(P), "none")


@MODULES
def test_it_is_trained(module):
    module, x = module().double(), torch.randn(2, 9, N * P, dtype=torch.float64)
    found = []
    for call in (module, torch.compile(module, backend="mla")):
        module.zero_grad()
        with torch.enable_grad():
            call(x).square().sum().backward()
        found.append({name: parameter.grad.clone() for name, parameter in module.named_parameters()})
    (site,) = mla_compile.last_report().sites
    assert site.path == "chunked"
    eager, ours = found
    for name, grad in eager.items():
        torch.testing.assert_close(ours[name], grad, msg=lambda text, name=name: f"{name}: {text}")


class Shared(nn.Module):
    """Sequences that share a latent, but not its rope keys."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(L, 2 * N * P, bias=False)

    def forward(self, q, latent, k_rope):
        sequences = q.shape[0]
        k, v = self.up(latent).unflatten(1, (N, 2 * P)).transpose(0, 1).expand(sequences, -1, -1, -1).chunk(2, dim=-1)
        k = torch.cat([k, k_rope[:, None].expand(-1, N, -1, -1)], dim=-1)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_sequences_that_share_a_latent_are_not_trained():
    module = Shared().double()
    given = [torch.randn(shape, dtype=torch.float64) for shape in ((3, N, 2, P + 4), (40, L), (3, 40, 4))]
    compiled = torch.compile(module, backend="mla")
    torch.testing.assert_close(compiled(*given), module(*given))
    assert mla_compile.last_report().sites[0].rewritten
    with torch.enable_grad():
        compiled(*given).sum().backward()
    (site,) = mla_compile.last_report().sites
    assert site.reason.startswith("expected rope keys of all sequences that share a latent where gradients are needed")
