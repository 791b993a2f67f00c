"""Keys whose columns are joined for all heads before they are cut into heads become one up-projection."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_unchanged, compiled, unfolded
from tests.passes.spellings import HIDDEN, SQ, B, Function, L, N, P, R, T, V

WIDE = 8
"""Nope columns of a head of which so many that 4 heads of 5 have them alone: N WIDE = 4 (WIDE + R)."""


def wide_heads() -> tuple[Tensor, ...]:
    """`mla.tensors()` with `WIDE` nope columns a head, so that the seam falls between two heads."""
    shapes = (B, SQ, HIDDEN), (B, T, L), (B, T, R), (HIDDEN, N * (WIDE + R)), (L, N * (WIDE + V))
    generator = torch.Generator().manual_seed(0)
    x, latent, k_rope, w_q, w_kv = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x, latent, k_rope, w_q / HIDDEN**0.5, w_kv / L**0.5


TENSORS = {"a seam in a head": mla.tensors(), "a seam between heads": wide_heads()}


def for_all(k_rope: Tensor) -> Tensor:
    """The rope key once for each head, `[B, T, N R]`."""
    return k_rope[:, :, None].expand(-1, -1, N, -1).flatten(2)


def weight(rows: int, columns: int) -> Tensor:
    return torch.arange(rows * columns, dtype=torch.float64).view(rows, columns).cos()


def projected(tensor: Tensor, bias: float = 0.0) -> Tensor:
    """A key of all heads that is linear in `tensor`, as a shared key without a rope is, `[B, T, R]`."""
    return tensor @ weight(tensor.shape[-1], R) + bias * torch.arange(R)


def joined(join: Function, attend: Function = mla.softmax) -> Function:
    """Attention whose keys are `join(nope, k_rope, latent)`, `[B, T, N (P + R)]`, cut into heads; `nope` is the keys'
    up-projection for all heads, `[B, T, N P]`. P is what the weights have."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        nope, v = (latent @ w_kv).split([w_kv.shape[1] - N * V, N * V], -1)
        k = join(nope, k_rope, latent).view(latent.shape[0], latent.shape[1], N, -1)
        v = v.view(latent.shape[0], latent.shape[1], N, V)
        q = (x @ w_q).view(x.shape[0], x.shape[1], N, -1)
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))

    return attention


REWRITTEN: dict[str, Function] = {
    "rope keys last": joined(lambda nope, k_rope, latent: torch.cat([nope, for_all(k_rope)], -1)),
    "rope keys first": joined(lambda nope, k_rope, latent: torch.cat([for_all(k_rope), nope], -1)),
    "sealed": joined(lambda nope, k_rope, latent: torch.cat([nope, for_all(k_rope)], -1), mla.sealed),
    "by repeat": joined(lambda nope, k_rope, latent: torch.cat([nope, k_rope.repeat(1, 1, N)], -1)),
    "each column N times": joined(
        lambda nope, k_rope, latent: torch.cat([nope, k_rope.repeat_interleave(N, dim=-1)], -1)
    ),
    "columns that repeat nowhere": joined(
        lambda nope, k_rope, latent: torch.cat([k_rope, nope, latent @ weight(L, N * R - R)], -1)
    ),
    "columns of the latent itself": joined(
        lambda nope, k_rope, latent: torch.cat([latent, nope, latent.flip(1) @ weight(L, N * R - L)], -1)
    ),
    "in three pieces": joined(
        lambda nope, k_rope, latent: torch.cat([nope[..., :-3], for_all(k_rope), nope[..., -3:]], -1)
    ),
    "with a bias": joined(
        lambda nope, k_rope, latent: torch.cat([nope + torch.arange(nope.shape[-1]), for_all(k_rope)], -1)
    ),
    "of a function of the rope key": joined(
        lambda nope, k_rope, latent: torch.cat([nope * 0.5, for_all(k_rope.sin())], -1).contiguous()
    ),
    "of a function of the latent": joined(
        lambda nope, k_rope, latent: torch.cat([nope, for_all(latent[..., :R].cos())], -1)
    ),
    "of a projection of the rope key": joined(
        lambda nope, k_rope, latent: torch.cat([for_all(projected(k_rope)), nope], -1)
    ),
    "of a projection of the latent": joined(
        lambda nope, k_rope, latent: torch.cat([nope, for_all(projected(latent))], -1)
    ),
    "of a projection of the latent, all with biases": joined(
        lambda nope, k_rope, latent: torch.cat(
            [nope * 0.5 + torch.arange(nope.shape[-1]), projected(latent, 0.1).repeat_interleave(N, dim=-1)], -1
        )
    ),
    "of projections to which each head adds its own": joined(
        lambda nope, k_rope, latent: torch.cat(
            [for_all(projected(k_rope)) + torch.arange(N * R), nope[..., 1:], for_all(projected(latent))[..., :1]], -1
        )
    ),
    "of a projection of the latents of other tokens": joined(
        lambda nope, k_rope, latent: torch.cat([nope, for_all(projected(latent.roll(1, 1)))], -1)
    ),
}


@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("function", REWRITTEN.values(), ids=REWRITTEN)
def test_columns_on_both_sides_of_the_seam_are_up_projected(function: Function, tensors: tuple[Tensor, ...]) -> None:
    for path, module, outcomes in compiled(function, tensors):
        assert [outcome.path for outcome in outcomes] == [path]
        assert not unfolded(module)


@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
def test_sizes_that_are_not_known(tensors: tuple[Tensor, ...]) -> None:
    for path, _, outcomes in compiled(REWRITTEN["rope keys last"], tensors, mla.UNKNOWN):
        assert [outcome.path for outcome in outcomes] == [path]


WIDTHS: dict[str, tuple[Function, int | None]] = {
    "a key of a wide tensor as it is": (lambda k_rope, latent: torch.cat([latent.sin(), latent.cos()], -1), L + R),
    "what a wider key is made of": (lambda k_rope, latent: k_rope[..., :1], L + 1),
    "the latent of the other columns": (lambda k_rope, latent: latent, None),
    "a key of other tokens' latents as it is": (lambda k_rope, latent: latent.roll(1, 1), L + R),
    "a key of latents of another scale as it is": (lambda k_rope, latent: latent * 2, L + R),
}
"""What a shared key is projected from, and the width of the keys' latent; None if it is that of the values."""


@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize(("of", "width"), WIDTHS.values(), ids=WIDTHS)
def test_a_shared_key_adds_as_few_columns_as_it_can(
    of: Function, width: int | None, tensors: tuple[Tensor, ...]
) -> None:
    function = joined(lambda nope, k_rope, latent: torch.cat([nope, for_all(projected(of(k_rope, latent), 0.1))], -1))
    for path, _, outcomes in compiled(function, tensors):
        assert [(o.path, o.shapes["L"], o.shapes.get("Lk")) for o in outcomes] == [(path, str(L), width and str(width))]


UNCHANGED: dict[str, Function] = {
    "a function of the up-projection": joined(
        lambda nope, k_rope, latent: torch.cat([nope.tanh(), for_all(k_rope)], -1)
    ),
    "rope keys that each head has for itself": joined(
        lambda nope, k_rope, latent: torch.cat([nope, for_all(k_rope) * torch.arange(N * R)], -1)
    ),
    "columns that repeat nowhere, more than the latent has": joined(
        lambda nope, k_rope, latent: torch.cat([nope, (latent @ weight(L, N * R)).sin()], -1)
    ),
    "a function of all": joined(lambda nope, k_rope, latent: torch.cat([nope, for_all(k_rope)], -1).tanh()),
    "padded with zeros": joined(lambda nope, k_rope, latent: F.pad(nope, (0, N * R))),
}
"""Keys that are not the joined latents times one matrix, or are not known to be."""


@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("function", UNCHANGED.values(), ids=UNCHANGED)
def test_other_columns_stay(function: Function, tensors: tuple[Tensor, ...]) -> None:
    check_unchanged(function, tensors)


def test_heads_of_one_latent_need_nothing() -> None:
    """Where columns of whole heads are joined, all of them up-projections, views alone say what they are."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        w_uk, w_uv = w_kv.split([N * P, N * V], -1)
        k = torch.cat([latent @ w_uk[:, : 2 * P], latent @ w_uk[:, 2 * P :]], -1).view(*latent.shape[:2], N, P)
        v = (latent @ w_uv).view(*latent.shape[:2], N, V)
        return mla.softmax(mla.queries(x, w_q)[..., :P], k.transpose(1, 2), v.transpose(1, 2))

    for path, module, outcomes in compiled(attention, mla.tensors()):
        assert [outcome.path for outcome in outcomes] == [path]
        assert not any("eye" in str(node.target) for node in module.graph.nodes)


def test_heads_of_two_latents_keep_a_latent_each() -> None:
    """One latent for all of them would be as wide as both, and half of what it is multiplied by zeros."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        first, second = (latent @ w_kv[:, : N * P]), (latent.sin() @ w_kv[:, : N * P])
        k = torch.cat([first, second], -1).view(*latent.shape[:2], 2 * N, P).transpose(1, 2)
        q = mla.queries(x, w_q)[..., :P].repeat(1, 2, 1, 1)
        return mla.softmax(q, k, k)

    for _, module, outcomes in compiled(attention, mla.tensors(), paths=["absorbed"]):
        assert [outcome.path for outcome in outcomes] == ["absorbed"]
        assert not any("pad" in str(node.target) for node in module.graph.nodes)


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_compiled(dtype: torch.dtype) -> None:
    given = [t.to(dtype) for t in mla.tensors()]
    plain = joined(lambda nope, k_rope, latent: torch.cat([nope, for_all(k_rope)], -1), F.scaled_dot_product_attention)
    exact = plain(*(t.double() for t in given))
    o = torch.compile(plain, backend="mla", options={"mla.strict": True})(*given)
    eager = (plain(*given).double() - exact).abs().max()
    assert (o.double() - exact).abs().max() <= 4 * eager
