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


def at_once(gates: Tensor, latent: Tensor, experts: Tensor) -> Tensor:
    return torch.einsum("bte,btl,eld->btd", gates, latent, experts)


def one_by_one(gates: Tensor, latent: Tensor, experts: Tensor) -> Tensor:
    return torch.einsum("bte,bted->btd", gates, torch.einsum("btl,eld->bted", latent, experts))


def of_one_weight(gates: Tensor, latent: Tensor, experts: Tensor) -> Tensor:
    """As a linear layer has it, `[E D, L]`."""
    return (gates[:, :, None] @ (latent @ experts.mT.flatten(0, 1).mT).unflatten(-1, experts.shape[::2])).squeeze(2)


def with_biases(gates: Tensor, latent: Tensor, experts: Tensor) -> Tensor:
    up_projected = torch.einsum("btl,eld->bted", latent, experts) + experts[:, 0]
    return torch.einsum("bte,bted->btd", gates, up_projected)


EXPERTS = torch.randn(4, 6, 64)


@pytest.mark.parametrize("mixed", [at_once, one_by_one, of_one_weight, with_biases])
@pytest.mark.parametrize("router", ["latent", "token"])
def test_a_mixture_of_up_projections_is_no_attention(mixed, router):
    """Each token's own share of each expert, and all products of tokens with experts, which differ for every token."""

    def soft(q: Tensor, latent: Tensor, experts: Tensor, router: Tensor, x: Tensor) -> Tensor:
        gates = softmax((latent if router.shape[1] == latent.shape[2] else x) @ router.mT, dim=-1)
        k, v = mixed(gates, latent, experts).unflatten(-1, (4, 16)).transpose(1, 2).split([8, 8], dim=-1)
        return attend(q @ k.mT, v)

    x = torch.randn(1, 9, 10)
    weight = torch.randn(4, 6 if router == "latent" else 10)
    results = Pipeline(DEVICE)(capture(soft, Q, LATENT, EXPERTS, weight, x))
    assert len(results) == 1
    assert [axis.size for axis in results[0].found.keys] == [9]


def of_each_head(q: Tensor, latent: Tensor, experts: Tensor, router: Tensor) -> Tensor:
    gates = softmax(torch.einsum("btl,nel->btne", latent, router.unflatten(0, (3, 4))), dim=-1)
    return torch.einsum("btne,btl,elnd->btnd", gates, latent, experts[..., :48].unflatten(-1, (3, 16)))


def of_each_sequence(q: Tensor, latent: Tensor, experts: Tensor, router: Tensor) -> Tensor:
    """What has an element for each sequence may be its tokens."""
    tokens = router.unflatten(0, (2, 6))
    gates = softmax(tokens @ latent[0, :2].mT, dim=-1)
    return torch.einsum("bte,btl,beld->btd", gates, tokens, experts.unflatten(0, (2, 2)))


def activated(q: Tensor, latent: Tensor, experts: Tensor, router: Tensor) -> Tensor:
    gates = softmax(latent @ router[:4].mT, dim=-1)
    return torch.einsum("bte,bted->btd", gates, torch.einsum("btl,eld->bted", latent, experts).relu())


def to_a_given_latent(q: Tensor, latent: Tensor, experts: Tensor, router: Tensor) -> Tensor:
    """One head and sequence: what is given for each of its tokens has no columns."""
    return attend(q[0, 0, :, :6] @ router[:9].mT, latent[0] @ experts[0])


@pytest.mark.parametrize("function", [of_each_head, of_each_sequence, activated, to_a_given_latent])
def test_what_may_be_attention_counts(function):
    (result,) = Pipeline(DEVICE, training=True)(capture(function, Q, LATENT, EXPERTS, torch.randn(12, 6)))
    assert not result.outcome.rewritten


@pytest.mark.parametrize(("function", "step"), CASES.values(), ids=CASES)
def test_a_result_says_which_step_refused(function, step):
    (result,) = Pipeline(DEVICE)(capture(function, Q, LATENT, WEIGHT))
    assert result.stopped == step
    assert step is None or step in STEPS
    assert result.outcome.rewritten == (step is None)
    assert (result.found is None) == (step == "find")
    assert (result.site is None) == (step is not None)
