"""The steps of the pipeline, and which of them refuses an attention."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softmax

from mla_compile.passes.pipeline import STEPS, Pipeline
from tests.passes.graphs import DEVICE, capture

Q, LATENT, WEIGHT = torch.randn(1, 4, 3, 8), torch.randn(1, 9, 6), torch.randn(6, 64)


def attend(scores: Tensor, value: Tensor) -> Tensor:
    return softmax(scores, dim=-1) @ value


def keys_and_values(latent: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return (latent @ weight).unflatten(-1, (4, 16)).transpose(1, 2).split([8, 8], dim=-1)


def by_the_book(q: Tensor, latent: Tensor, weight: Tensor) -> Tensor:
    k, v = keys_and_values(latent, weight)
    return attend(q @ k.mT, v)


def no_latent(q: Tensor, latent: Tensor, weight: Tensor) -> Tensor:
    k, v = keys_and_values(latent, weight)
    return attend(q @ k.mT, v.sin())


def over_the_queries(q: Tensor, latent: Tensor, weight: Tensor) -> Tensor:
    k, v = keys_and_values(latent, weight)
    return softmax(q @ k.mT, dim=-2) @ v


CASES = {"rewritten": (by_the_book, None), "no latent": (no_latent, "prove"), "other rows": (over_the_queries, "find")}


def test_a_mixture_of_weights_is_no_attention():
    """A router's softmax, which multiplies matrices that all sequences share, one of which then projects to queries."""

    def routed(q: Tensor, latent: Tensor, weight: Tensor) -> Tensor:
        mixed = attend(q[:, 0, 0] @ weight[:, :8].mT, weight)  # [1, 64]: each expert's row of the weight
        return by_the_book(q * mixed[:, None, None, :8], latent, weight)

    (result,) = Pipeline(DEVICE)(capture(routed, Q, LATENT, WEIGHT))
    assert result.outcome.rewritten


@pytest.mark.parametrize(("function", "step"), CASES.values(), ids=CASES)
def test_a_result_says_which_step_refused(function, step):
    (result,) = Pipeline(DEVICE)(capture(function, Q, LATENT, WEIGHT))
    assert result.stopped == step
    assert step is None or step in STEPS
    assert result.outcome.rewritten == (step is None)
    assert (result.found is None) == (step == "find")
    assert (result.site is None) == (step is not None)
