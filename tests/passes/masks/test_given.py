"""The report says what a mask costs that is an input of the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.graphs import capture, rewrite
from tests.passes.spellings import SQ, B, T

SEEN = torch.ones(T, T, dtype=torch.bool).tril()


def hint(masked: Callable[[Tensor, Tensor], Tensor], mask: Tensor) -> tuple[str, str]:
    """The words for the mask and the hint, of an attention whose scores are masked with an input."""

    def attention(mask: Tensor, *inputs: Tensor) -> Tensor:
        return mla.softmax(*mla.naive(*inputs), lambda scores: masked(scores, mask))

    (outcome,) = rewrite(capture(attention, mask, *mla.tensors()))
    assert outcome.rewritten
    return outcome.mask, outcome.hint


@pytest.mark.parametrize(
    "masked",
    [
        lambda scores, mask: scores.masked_fill(~mask[T - SQ :], -torch.inf),
        lambda scores, mask: scores.masked_fill(mask.long()[T - SQ :] == 0, -torch.inf),
        lambda scores, mask: scores + torch.where(mask, 0.0, -torch.inf)[T - SQ :],
    ],
)
def test_a_buffer_says_nothing(masked: Callable[[Tensor, Tensor], Tensor]) -> None:
    words, said = hint(masked, SEEN)
    assert words == "tensor"
    assert said.startswith("the mask is an input of the graph (a buffer or an argument)")


def test_padding_can_be_nothing_else() -> None:
    padding = torch.ones(B, 1, 1, T, dtype=torch.bool)
    assert hint(lambda scores, mask: scores.masked_fill(~mask, -torch.inf), padding)[1] == ""


def test_a_mask_that_the_forward_computes_is_known_or_its_own() -> None:
    def causal(scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(~torch.ones_like(mask).tril()[T - SQ :], -torch.inf)

    def product(scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill((mask.long() @ mask.long())[T - SQ :] == 0, -torch.inf)

    assert hint(causal, SEEN) == ("causal", "")
    assert hint(product, SEEN) == ("tensor", "")
