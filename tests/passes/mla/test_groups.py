"""Groups of heads with a latent each: the passes find one attention per group, or say why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.checks import check_rewritten, compiled
from tests.passes.graphs import capture, rewrite
from tests.passes.spellings import SCALE, SQ, B, L, P, R, T, V, sealed

G, EACH = 3, 2
HEADS = G * EACH


def tensors(groups: int = G) -> tuple[Tensor, ...]:
    """`q` [B, N, Sq, P + R], latents [B, T, G, L], `k_rope` [B, T, R], `w_uk` [N, P, L], `w_uv` [N, V, L]."""
    heads = groups * EACH
    shapes = (B, heads, SQ, P + R), (B, T, groups, L), (B, T, R), (heads, P, L), (heads, V, L)
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def expanded(latents: Tensor, weight: Tensor) -> Tensor:
    """`[B, N, T, D]`"""
    by_group = weight.unflatten(0, (latents.shape[2], -1))
    return torch.einsum("btgl,gndl->bgntd", latents, by_group).flatten(1, 2)


def repeated(latents: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("btnl,ndl->bntd", latents.repeat_interleave(EACH, 2), weight)


def joined(latents: Tensor, weight: Tensor) -> Tensor:
    """Up-projected group by group, and concatenated."""
    groups = zip(latents.unbind(2), weight.chunk(latents.shape[2]), strict=True)
    return torch.cat([(c @ w.flatten(0, 1).t()).unflatten(-1, w.shape[:2]) for c, w in groups], 2).transpose(1, 2)


def to_heads(k_rope: Tensor) -> Tensor:
    return k_rope[:, None].expand(-1, HEADS, -1, -1)


def attention(
    project: Callable[[Tensor, Tensor], Tensor],
    attend: Callable[..., Tensor] = sealed,
    rope: Callable[[Tensor], Tensor] = to_heads,
) -> Callable[..., Tensor]:
    def function(q: Tensor, latents: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        k = torch.cat([project(latents, w_uk), rope(k_rope)], -1)
        return attend(q, k, project(latents, w_uv))

    return function


def softmax(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v: change(q @ k.mT * SCALE).softmax(-1) @ v


def slopes(scores: Tensor) -> Tensor:
    """A bias that differs between heads, and a causal mask."""
    rows, keys = torch.arange(SQ)[:, None], torch.arange(T)
    bias = torch.arange(HEADS).double()[:, None, None] * (keys - rows) / 8
    return (scores + bias).masked_fill(keys > rows + T - SQ, -torch.inf)


def in_one_tensor(q: Tensor, latents: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """Latents after the rope key in one cache, so that no group begins at a multiple of its width."""
    cache = torch.cat([k_rope, latents.flatten(2)], -1)
    parts = [cache[..., R + g * L : R + (g + 1) * L] for g in range(G)]

    def project(weight: Tensor) -> Tensor:
        products = [torch.einsum("btl,ndl->bntd", c, w) for c, w in zip(parts, weight.chunk(G), strict=True)]
        return torch.cat(products, 1)

    return sealed(q, torch.cat([project(w_uk), to_heads(cache[..., :R])], -1), project(w_uv))


def of_its_own(*order: int, attend: Callable[..., Tensor] = sealed) -> Callable[..., Tensor]:
    """The latent and the matrix of each group are tensors of their own; groups are concatenated along the heads.

    The keys use the latents in this `order`, the values in the order of their groups.
    """

    def function(q: Tensor, latents: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        normed = [F.rms_norm(c, (L,)) * (g + 1) for g, c in enumerate(latents.unbind(2))]

        def project(latents: list[Tensor], weight: Tensor) -> Tensor:
            pairs = zip(latents, weight.chunk(G), strict=True)
            return torch.cat([torch.einsum("btl,ndl->bntd", c, w.exp()) for c, w in pairs], 1)

        k = project([normed[g] for g in order], w_uk)
        return attend(q, torch.cat([k, to_heads(k_rope)], -1), project(normed, w_uv))

    return function


def a_head_each(q: Tensor, latents: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """As many groups as heads; no tensor has the latents, or the weights, of all groups as slices."""
    normed = [F.rms_norm(c, (L,)) for c in latents.unbind(2)]
    k, v = (torch.stack([c @ w.exp().T for c, w in zip(normed, each, strict=False)], 1) for each in (w_uk, w_uv))
    return sealed(q[:, :G], torch.cat([k, to_heads(k_rope)[:, :G]], -1), v)


def from_few_columns(q: Tensor, latents: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """All latents together are wider than what they are projected from."""
    down = w_uv.flatten()[: 3 * G * L].view(3, G * L)
    made = (latents[:, :, 0, :3] @ down).unflatten(-1, (G, L))
    return sealed(q, torch.cat([expanded(made, w_uk), to_heads(k_rope)], -1), expanded(made, w_uv))


def in_zeros(*places: int, cut: bool = True, attend: Callable[..., Tensor] = sealed) -> Callable[..., Tensor]:
    """Keys and values are written group by group into zeros. Values, with a bias, start at `places[g]` in group g."""

    def function(q: Tensor, latents: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        k, v = (q.new_zeros(B, HEADS, T, width) for width in (P + R, V + 3))
        for g, (c, uk, uv) in enumerate(zip(latents.unbind(2), w_uk.chunk(G), w_uv.chunk(G), strict=True)):
            normed, heads = F.rms_norm(c, (L,)) * (g + 1), slice(g * EACH, (g + 1) * EACH)
            k[:, heads, :, :P] = torch.einsum("btl,ndl->bntd", normed, uk)
            v[:, heads, :, places[g] : places[g] + V] = torch.einsum("btl,ndl->bntd", normed, uv) + uv[:, None, :, 0]
        k[..., P:].copy_(k_rope[:, None])
        o = attend(q, k, v)
        return o[..., places[0] : places[0] + V] if cut else o

    return function


def gate(latents: Tensor) -> Tensor:
    """One number per key for all heads."""
    return latents[..., 0, 0].sigmoid()[:, None, :, None]


def gate_of_a_group(latents: Tensor) -> Tensor:
    return latents[..., 0].sigmoid().transpose(1, 2).repeat_interleave(EACH, 1)[..., None]


def gated(
    project: Callable[[Tensor, Tensor], Tensor],
    of_keys: Callable[[Tensor], Tensor] = gate,
    of_values: Callable[[Tensor], Tensor] | None = None,
    rope: Callable[[Tensor], Tensor] = to_heads,
    *,
    whole: bool = False,
) -> Callable[..., Tensor]:
    """Nope keys, or `whole` keys with the rope key, are multiplied by one factor, and values by the same or another."""

    def function(q: Tensor, latents: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        k, factor = project(latents, w_uk), of_keys(latents)
        k = torch.cat([k if whole else k * factor, rope(k_rope)], -1)
        v = project(latents, w_uv) * (of_values or of_keys)(latents)
        return sealed(q, k * factor if whole else k, v)

    return function


def apart(latents: Tensor, weight: Tensor) -> Tensor:
    """Each group's latent is a tensor of its own; groups are concatenated along the heads."""
    pairs = zip(latents.unbind(2), weight.chunk(G), strict=True)
    return torch.cat([torch.einsum("btl,ndl->bntd", c.exp(), w) for c, w in pairs], 1)


def gated_apart(latents: Tensor, weight: Tensor) -> Tensor:
    """The same, but each group is gated before groups are concatenated."""
    pairs = zip(latents.unbind(2), weight.chunk(G), strict=True)
    return torch.cat([torch.einsum("btl,ndl->bntd", c.exp(), w) * c[:, None, :, :1] for c, w in pairs], 1)


def a_sequence_each(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by hand; the products of each sequence are written to a buffer."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        whole = a.new_empty(*a.shape[:-1], b.shape[-1])
        for i in range(B):
            whole[i] = a[i] @ b[i]
        return whole

    return product(product(q, k.mT * SCALE).softmax(-1), v)


GATED = {
    "a gate": gated(expanded),
    "a gate a group": gated(expanded, gate_of_a_group),
    "a gate of repeated latents": gated(repeated, gate_of_a_group),
    "a gate of joined groups": gated(joined),
    "a gate a joined group": gated(joined, gate_of_a_group),
    "a gate of all of the keys": gated(joined, whole=True),
    "a gate of tensors of their own": gated(apart),
    "a gate a tensor of its own": gated(apart, gate_of_a_group),
    "a gate before the join": attention(gated_apart),
    "a gate before the join and one after": gated(gated_apart),
}

GROUPED = GATED | {
    "tensors of their own": of_its_own(0, 1, 2),
    "tensors of their own, sequence by sequence": of_its_own(0, 1, 2, attend=a_sequence_each),
    "written into zeros": in_zeros(0, 0, 0),
    "written behind zeros": in_zeros(1, 1, 1, cut=False),
    "written into zeros, softmax by hand": in_zeros(2, 2, 2, attend=softmax(lambda s: s)),
    "a head each": a_head_each,
    "made of few columns": from_few_columns,
    "einsum": attention(expanded),
    "repeated": attention(repeated),
    "joined": attention(joined),
    "in one tensor": in_one_tensor,
    "tokens before heads": lambda *args: attention(expanded)(*args).transpose(1, 2).flatten(2),
    "softmax by hand": attention(expanded, softmax(lambda s: s)),
    "a bias a head and a mask": attention(expanded, softmax(slopes)),
    "a rope key a group": attention(
        expanded, rope=lambda k: torch.stack([k * (g + 1) for g in range(G)], 1).repeat_interleave(EACH, 1)
    ),
    "without rope": lambda q, c, _, w_uk, w_uv: sealed(q[..., :P], expanded(c, w_uk), expanded(c, w_uv)),
}


@pytest.mark.parametrize("function", GROUPED.values(), ids=GROUPED)
def test_a_latent_a_group_is_an_attention_a_group(function: Callable[..., Tensor]) -> None:
    for path, module, outcomes in compiled(function, tensors()):
        assert [outcome.path for outcome in outcomes] == [path]
        assert "a latent for each of 3 groups of heads" in outcomes[0].reason
        ops = [node for node in module.graph.nodes if "latent_attention" in str(node.target)]
        ops += [node for node in module.graph.nodes if "expanded_attention" in str(node.target)]
        assert len(ops) == G


def in_two_tensors(latents: Tensor, weight: Tensor) -> Tensor:
    """Half of the heads have latents in one tensor, the others in another; each head has a latent of its own."""
    halves = zip((latents.exp(), latents.sin()), weight.chunk(2), strict=True)
    return torch.cat([torch.einsum("btnl,ndl->bntd", c, w) for c, w in halves], 1)


def test_groups_within_groups() -> None:
    for path, module, outcomes in compiled(attention(in_two_tensors), tensors()):
        assert [outcome.path for outcome in outcomes] == [path]
        assert "a latent for each of 6 groups of heads" in outcomes[0].reason
        assert sum("_attention.default" in str(node.target) for node in module.graph.nodes) == HEADS


def in_one_group_only(latents: Tensor, weight: Tensor) -> Tensor:
    """Half of the heads share a latent, each of the others has its own."""
    shared = torch.einsum("btl,ndl->bntd", latents[:, :, 0].exp(), weight[:G])
    return torch.cat([shared, torch.einsum("btnl,ndl->bntd", latents.sin(), weight[G:])], 1)


def test_one_weight_for_all_groups_is_one_attention() -> None:
    """Groups with one weight are like sequences of a batch."""

    def function(q: Tensor, latents: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        k, v = (torch.einsum("btgl,ndl->bgntd", latents, w[:EACH]).flatten(1, 2) for w in (w_uk, w_uv))
        return sealed(q, torch.cat([k, to_heads(k_rope)], -1), v)

    check_rewritten(function, tensors())


@pytest.mark.parametrize("symbolic", [(), ((2,), (1,), (1, 2))], ids=["static", "symbolic"])
@pytest.mark.parametrize("tokens", [T, L, L - 3])
def test_latents_that_tokens_of_a_sequence_mix_are_of_one_attention(
    tokens: int, symbolic: Sequence[Sequence[int]]
) -> None:
    """`mix @ latents` is one product per sequence, which is not to be taken for an up-projection of each sequence, nor
    its first factor for a latent, however few tokens there are."""

    def mixed(q: Tensor, latents: Tensor, mix: Tensor, w_uv: Tensor) -> Tensor:
        c = (mix.tril() @ latents)[:, None]
        return (q @ c.mT * SCALE).softmax(-1) @ c @ w_uv.mT

    shapes = (B, HEADS, tokens, L), (B, tokens, L), (B, tokens, tokens), (HEADS, V, L)
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    for _, _, (outcome,) in compiled(mixed, given, symbolic):
        assert outcome.path == "absorbed"
        assert outcome.shapes["B"] == str(B)
        assert outcome.shapes["L"] == str(L)


@pytest.mark.parametrize("tokens", [T, L])
def test_latents_that_each_token_is_projected_to_are_latents_however_many_tokens_there_are(
    tokens: int,
) -> None:
    def projected(q: Tensor, x: Tensor, down: Tensor, w_uv: Tensor) -> Tensor:
        c = (x @ down)[:, None]
        return (q @ c.mT * SCALE).softmax(-1) @ c @ w_uv.mT

    shapes = (B, HEADS, SQ, L), (B, tokens, L + 5), (L + 5, L), (HEADS, V, L)
    for _, _, (outcome,) in compiled(projected, [torch.randn(shape, dtype=torch.float64) for shape in shapes]):
        assert outcome.path == "absorbed"
        assert outcome.shapes["L"] == str(L)


def knorm(k: Tensor) -> Tensor:
    return F.rms_norm(k, k.shape[-1:])


REFUSED = {
    "a gate a head": (
        gated(expanded, lambda c: c[..., 0, :1].exp()[:, None] * torch.arange(1, HEADS + 1).double()[:, None, None]),
        G,
        "an up-projection times `",
    ),
    "written to other columns in one group": (in_zeros(0, 0, 1, cut=False), G, "expected values that are an up-"),
    "too many": (attention(expanded, rope=lambda k: k[:, None].expand(-1, 9 * EACH, -1, -1)), 9, "found 9"),
    "groups within one group": (attention(in_one_group_only), G, "expected values that are an up-projection"),
    "a soft cap": (attention(expanded, softmax(torch.tanh)), G, "where groups of heads have a latent each"),
    "a norm a head": (
        lambda q, c, _, w_uk, w_uv: sealed(q[..., :P], knorm(expanded(c, w_uk)), expanded(c, w_uv)),
        G,
        "of which some columns are an up-projection",
    ),
}
"""Near misses, with the number of groups and a part of the reason."""


@pytest.mark.parametrize(("function", "groups", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_near_miss_stays_as_it_is(function: Callable[..., Tensor], groups: int, reason: str) -> None:
    (outcome,) = rewrite(capture(function, *tensors(groups)))
    assert outcome.path == "unchanged"
    assert reason in outcome.reason
