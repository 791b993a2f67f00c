"""Adapters (LoRA, DoRA) beside an up-projection: sums of products of one latent are a product with one weight."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from mla_compile.passes.algebra.made import addends
from mla_compile.passes.text.sites import site_text
from tests.passes import spellings as mla
from tests.passes.checks import check_right, compiled, unfolded
from tests.passes.graphs import capture, rewrite, run
from tests.passes.mla.test_prove import site
from tests.passes.spellings import Function, L, N, P, T, V

RANK, OUT = 6, N * (P + V)
"""A rank that is divisible by neither N nor T, by which `unfolded` recognises tensors."""


def inputs() -> tuple[Tensor, ...]:
    """The tensors of MLA, an adapter `[L, RANK]` and `[RANK, OUT]`, and magnitudes `[OUT]`, as in DoRA."""
    generator = torch.Generator().manual_seed(2)
    shapes = (L, RANK), (RANK, OUT), (OUT,)
    return *mla.tensors(), *(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def to_heads(kv: Tensor) -> tuple[Tensor, ...]:
    return kv.view(-1, T, N, P + V).transpose(1, 2).split([P, V], -1)


def attend(x: Tensor, k_rope: Tensor, w_q: Tensor, kv: Tensor, attention: Function = mla.softmax) -> Tensor:
    k_nope, v = to_heads(kv)
    return attention(mla.queries(x, w_q), torch.cat([k_nope, mla.to_heads(k_rope)], -1), v)


def beside(x, latent, k_rope, w_q, w_kv, a, b, _):
    return attend(x, k_rope, w_q, latent @ w_kv + latent @ a @ b * 2)


def sealed(x, latent, k_rope, w_q, w_kv, a, b, _):
    return attend(x, k_rope, w_q, latent @ w_kv + latent @ a @ b * 2, mla.sealed)


def adapter_first(x, latent, k_rope, w_q, w_kv, a, b, _):
    return attend(x, k_rope, w_q, (latent @ a * 0.5) @ b + latent @ w_kv)


def taken_off(x, latent, k_rope, w_q, w_kv, a, b, _):
    return attend(x, k_rope, w_q, latent @ w_kv - latent @ a @ b)


def in_one_op(x, latent, k_rope, w_q, w_kv, a, b, _):
    low = (latent @ a).flatten(0, 1)
    return attend(x, k_rope, w_q, torch.addmm((latent @ w_kv).flatten(0, 1), low, b, alpha=0.3))


def twice(x, latent, k_rope, w_q, w_kv, a, b, _):
    return attend(x, k_rope, w_q, latent @ w_kv + latent @ a @ b + latent @ a.flip(0) @ b.flip(1) * 3)


def of_heads(x, latent, k_rope, w_q, w_kv, a, b, _):
    """The adapter is added after the split into heads, to the keys alone."""
    k_nope, v = mla.up_projected(latent, w_kv)
    k_nope = k_nope + to_heads(latent @ a @ b)[0]
    return mla.softmax(mla.queries(x, w_q), torch.cat([k_nope, mla.to_heads(k_rope)], -1), v)


def with_magnitudes(x, latent, k_rope, w_q, w_kv, a, b, m):
    scale = m / (w_kv + a @ b).norm(dim=0)
    plain = latent @ w_kv
    return attend(x, k_rope, w_q, plain + (scale - 1) * plain + scale * (latent @ a @ b) * 2)


def full_rank(x, latent, k_rope, w_q, w_kv, *_):
    return attend(x, k_rope, w_q, latent @ w_kv + latent @ w_kv.flip(1))


def latent_as_product(x, latent, k_rope, w_q, w_kv, a, b, _):
    """The latent is a product with an adapter, too."""
    own = latent @ w_q[:L, :L] + latent @ a @ b[:, :L]
    return attend(x, k_rope, w_q, own @ w_kv + own @ a @ b)


SUMS = [
    *(beside, sealed, adapter_first, taken_off, in_one_op, twice, of_heads, with_magnitudes, full_rank),
    latent_as_product,
]


@pytest.mark.parametrize("function", SUMS)
def test_a_sum_is_one_weight(function: Function) -> None:
    for path, module, outcomes in compiled(function, inputs()):
        assert [(o.path, o.reason) for o in outcomes] == [(path, "asked for by mla.path")]
        assert not unfolded(module)


@pytest.mark.parametrize("path", ["absorbed", "chunked"])
@pytest.mark.parametrize("function", [beside, twice])
def test_the_sum_is_written_nowhere(function: Function, path: str) -> None:
    """Rounded to the weights' dtype, a sum could lose a small adapter: each term is multiplied separately."""
    module = capture(function, *inputs())
    before = run(module, *inputs())
    (outcome,) = rewrite(module, path)
    assert outcome.path == path
    check_right(before, run(module, *inputs()))
    made = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.add.Tensor]
    assert not [node for node in module.graph.nodes if node.target in made and node.meta["val"].numel() == L * OUT]


def test_what_a_sum_is_made_of_is_said() -> None:
    proved = site(beside, *inputs())
    assert proved.w_uk is not None
    assert len(addends(proved.w_uk)) == 2
    line = next(line for line in site_text(proved).splitlines() if line.startswith("w_uk"))
    of_adapter = "(sum_w3 a_1[w0, w3] b_1[w3, w1 * 10 + w2])[w0, w1, w2] * 2"
    assert line.split(" = ")[1] == f"(w_kv_1[w0, w1 * 10 + w2] + {of_adapter})[l, n, p]"


def with_dropout(x, latent, k_rope, w_q, w_kv, a, b, _):
    return attend(x, k_rope, w_q, latent @ w_kv + torch.dropout(latent, 0.5, True) @ a @ b)


def of_another_rank(x, latent, k_rope, w_q, w_kv, a, b, _):
    return attend(x, k_rope, w_q, latent @ w_kv + latent[..., :RANK] @ b)


def of_other_tokens(x, latent, k_rope, w_q, w_kv, a, b, _):
    return attend(x, k_rope, w_q, latent @ w_kv + latent.roll(1, 1) @ a @ b)


def with_a_nonlinearity(x, latent, k_rope, w_q, w_kv, a, b, _):
    return attend(x, k_rope, w_q, latent @ w_kv + (latent @ a).relu() @ b)


@pytest.mark.parametrize("function", [with_dropout, of_another_rank, of_other_tokens, with_a_nonlinearity])
def test_products_of_two_latents_are_one_of_both(function: Function) -> None:
    """The other latent is what comes before the last matrix."""
    torch.manual_seed(3)
    assert site(function, *inputs()).sizes["L"] == L + RANK
    module = capture(function, *inputs())
    for path in ("absorbed", "chunked"):
        rewritten = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
        (outcome,) = rewrite(rewritten, path)
        assert outcome.path == path
        assert not unfolded(rewritten)
        before, after = (_seeded(graph) for graph in (module, rewritten))
        check_right(before, after)


def _seeded(module: torch.fx.GraphModule) -> Tensor:
    torch.manual_seed(3)
    return run(module, *inputs())


def with_a_wide_addend(x, latent, k_rope, w_q, w_kv, a, b, _):
    return attend(x, k_rope, w_q, latent @ w_kv + (latent @ a @ b).relu())


def test_what_is_added_to_a_product_has_to_be_one() -> None:
    (outcome,) = rewrite(capture(with_a_wide_addend, *inputs()))
    assert outcome.path == "unchanged"
    assert "an up-projection of a latent, found a sum of a product of `latent_1`" in outcome.reason
    assert outcome.remedy.startswith("let all that is added up be up-projections of latents")
