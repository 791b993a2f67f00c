"""Products of three: latents, weights, and queries or attention weights, whichever two torch multiplies first."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import compiled, unfolded
from tests.passes.spellings import SCALE, Function, P, R

LETTERS = {"q": "bnsp", "c": "btl", "k": "npl", "p": "bnst", "v": "nvl"}
ORDERS = [*map("".join, itertools.permutations("qck"))], [*map("".join, itertools.permutations("pcv"))]


def product(order: str, result: str, **operands: Tensor) -> Tensor:
    """One `einsum` of three operands, of which torch multiplies two at a time, from the left."""
    return torch.einsum(",".join(LETTERS[name] for name in order) + f"->{result}", *(operands[n] for n in order))


def in_threes(of_keys: str, of_values: str) -> Function:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        w_uk, w_uv = mla.weights(w_kv)
        q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
        scores = product(of_keys, "bnst", q=q_nope, c=latent, k=w_uk) + q_rope @ k_rope[:, None].mT
        return product(of_values, "bnsv", p=(scores * SCALE).softmax(-1), c=latent, v=w_uv)

    return attention


@pytest.mark.parametrize(("of_keys", "of_values"), [*zip(*ORDERS, strict=True), ("qck", "pvc"), ("qkc", "pvc")])
def test_latents_meet_weights_beside_a_third(of_keys: str, of_values: str) -> None:
    """An order that absorbs by hand leaves only the absorbed path; any other leaves both."""
    by_hand = of_keys[:2] in ("qk", "kq") or of_values[:2] in ("pc", "cp")
    for path, module, (outcome,) in compiled(in_threes(of_keys, of_values), mla.tensors()):
        assert outcome.path == ("absorbed" if by_hand else path)
        assert not unfolded(module)


def test_a_function_of_such_scores() -> None:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        w_uk, w_uv = mla.weights(w_kv)
        q = mla.queries(x, w_q)[..., :P]
        scores = product("qck", "bnst", q=q, c=latent, k=w_uk).tanh()
        return product("pvc", "bnsv", p=scores.softmax(-1), c=latent, v=w_uv)

    for path, _, (outcome,) in compiled(attention, mla.tensors()):
        assert outcome.path == path


def test_products_of_three_of_two_latents() -> None:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        w_uk, w_uv = mla.weights(w_kv)
        q = mla.queries(x, w_q)[..., :P]
        scores = product("qck", "bnst", q=q, c=latent.roll(1, 1), k=w_uk)
        return product("pvc", "bnsv", p=scores.softmax(-1), c=latent, v=w_uv)

    outcomes = {path: outcome for path, _, (outcome,) in compiled(attention, mla.tensors())}
    assert [(path, o.path) for path, o in outcomes.items()] == [("absorbed", "absorbed"), ("chunked", "chunked")]
    assert outcomes["absorbed"].shapes["Lk"] == outcomes["absorbed"].shapes["L"]
