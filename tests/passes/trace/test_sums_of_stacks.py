"""Up-projections that are stacked, then added up or averaged, are a sum of up-projections."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_unchanged, compiled
from tests.passes.spellings import Function, N, P, R, V


def of_several(combine: Function, count: int = 2) -> Function:
    """MLA whose keys and values are several up-projections of a latent, combined."""

    def projected(latent: Tensor, w_kv: Tensor) -> Sequence[Tensor]:
        return [latent @ (w_kv * (i + 1)).sin() for i in range(count)]

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        kv = combine(projected(latent, w_kv)).unflatten(-1, (N, P + V)).transpose(1, 2)
        k = torch.cat([kv[..., :P], mla.to_heads(k_rope)], -1)
        return mla.softmax(mla.queries(x, w_q), k, kv[..., P:])

    return attention


REWRITTEN: dict[str, Function] = {
    "a sum": of_several(lambda each: torch.stack(each).sum(0)),
    "a mean": of_several(lambda each: torch.stack(each).mean(0)),
    "along the last dimension": of_several(lambda each: torch.stack(each, -1).sum(-1)),
    "three": of_several(lambda each: torch.stack(each, 1).mean(1), 3),
    "kept dimensions": of_several(lambda each: torch.stack(each, 2).sum(2, keepdim=True).squeeze(2)),
    "by cat": of_several(lambda each: torch.cat([e[None] for e in each]).sum(0)),
    "numbers of each": of_several(lambda each: torch.stack([each[0] * 2, each[1] / 3]).sum(0)),
    "two latents": lambda x, latent, k_rope, w_q, w_kv: of_several(
        lambda each: torch.stack([each[0], (latent.tanh() @ w_kv)]).sum(0)
    )(x, latent, k_rope, w_q, w_kv),
}


@pytest.mark.parametrize("function", REWRITTEN.values(), ids=REWRITTEN)
def test_sums_of_stacks_are_sums(function: Function) -> None:
    check_rewritten(function, mla.tensors())


UNCHANGED: dict[str, Function] = {
    "more than a sum keeps": of_several(lambda each: torch.stack([e.cos() for e in each]).sum(0), 5),
    "functions of up-projections": of_several(lambda each: torch.stack([e.tanh() for e in each]).sum(0)),
    "the greatest": of_several(lambda each: torch.stack(each).amax(0)),
}


@pytest.mark.parametrize("function", UNCHANGED.values(), ids=UNCHANGED)
def test_other_reductions_stay(function: Function) -> None:
    check_unchanged(function, mla.tensors())


def test_scores_of_all_heads_are_not_taken_apart() -> None:
    """Their mean is one of few numbers too, but would be as many products for each head."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        q, k, v = (tensor[:, :4] for tensor in mla.naive(x, latent, k_rope, w_q, w_kv))
        return mla.softmax(q, k, v, lambda scores: scores + scores.mean(1, keepdim=True))

    for path, _, (outcome,) in compiled(attention, mla.tensors()):
        if path == "absorbed":
            assert (outcome.path, outcome.shapes["R"]) == (path, str(R))
        else:
            assert outcome.reason.startswith("expected a function of each score by itself for many queries")
