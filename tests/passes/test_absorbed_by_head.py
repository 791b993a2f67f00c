"""Scores that are absorbed by hand, one head at a time: no tensor has the queries of all heads in latent space."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import compiled
from tests.passes.spellings import SCALE, SQ, B, Function, N, P, R, T


def head_by_head(latents: Function, *, rope: bool, buffer: bool) -> Function:
    """Head n attends to `latents(latent, n)`; values are up-projected from the latent itself."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        w_uk, _ = mla.weights(w_kv)
        _, v = mla.up_projected(latent, w_kv)
        q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
        pieces = [q_nope[:, n] @ w_uk[n] @ latents(latent, n).mT for n in range(N)]
        scores = torch.stack(pieces, 1)
        if buffer:
            scores = torch.zeros(B, N, SQ, T).double()
            for n, piece in enumerate(pieces):
                scores[:, n] = piece
        scores = scores + q_rope @ mla.to_heads(k_rope).mT if rope else scores
        return (scores * SCALE).softmax(-1) @ v

    return attention


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("buffer", [False, True])
def test_the_queries_in_latent_space_are_computed_for_all_heads(rope: bool, buffer: bool) -> None:
    function = head_by_head(lambda latent, n: latent, rope=rope, buffer=buffer)
    for _, module, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == "absorbed"
        assert "mla.latent_attention" in module.code


OTHERS: dict[str, Function] = {
    "another latent for one head": lambda latent, n: latent.tanh() if n == 2 else latent,
    "another order of the keys for one head": lambda latent, n: latent.flip(1) if n == 2 else latent,
}


@pytest.mark.parametrize("latents", OTHERS.values(), ids=OTHERS)
def test_heads_that_attend_to_another_latent_stay(latents: Function) -> None:
    for _, _, outcomes in compiled(head_by_head(latents, rope=False, buffer=False), mla.tensors()):
        assert not any(outcome.rewritten for outcome in outcomes)


def test_heads_that_all_attend_to_another_latent_than_the_values() -> None:
    function = head_by_head(lambda latent, n: latent.tanh(), rope=False, buffer=False)
    outcomes = {path: outcome for path, _, (outcome,) in compiled(function, mla.tensors())}
    assert (outcomes["absorbed"].path, outcomes["absorbed"].shapes["P"]) == ("absorbed", "0")
