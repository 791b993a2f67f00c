"""Products over sizes that only data know, which torch 2.13's lowering on CPU cannot compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_compile
from mla_compile.inductor.sizes_from_data import bmm_of_sizes_from_data
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, Combined


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_scores_over_some_of_the_tokens_are_compiled(dtype: torch.dtype) -> None:
    """An indexer beside attention, as in GLM-5-Next: it scores those tokens that the data says are there."""
    module = Combined().to(dtype)

    def step(x: Tensor, cache: tuple[Tensor, Tensor], there: Tensor) -> tuple[Tensor, Tensor]:
        keys = cache[0][:, there.nonzero().squeeze(1)]
        scores = torch.matmul(x[..., : keys.shape[-1]].float(), keys.mT.float())
        return module(x, cache)[0], scores.relu().sum(-1)

    compiled = torch.compile(step, backend="mla")
    x, latent, rope_key = torch.randn(2, 3, HIDDEN), torch.randn(2, 9, 16), torch.randn(2, 9, 8)
    inputs = x.to(dtype), (latent.to(dtype), rope_key.to(dtype))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for there in (torch.arange(9) % 2 == 0, torch.arange(9) < 1, torch.arange(9) < 0):
            results = zip(compiled(*inputs, there), step(*inputs, there), strict=True)
            (out, eager), (scores, of_eager) = results
            assert mla_compile.last_report().rewritten == 1
            torch.testing.assert_close(scores, of_eager)
            exact = Combined().double()
            exact.load_state_dict({name: value.double() for name, value in module.state_dict().items()})
            right, _ = exact(inputs[0].double(), tuple(part.double() for part in inputs[1]))
            assert_as_close_as_eager(out, eager, right)


@pytest.mark.parametrize(
    "operands",
    [
        (torch.ones(2, 3, 4), torch.ones(2, 4, 5)),
        (torch.ones(2, 3, 4, device="meta"), torch.ones(2, 4, 5, device="meta")),
        (torch.ones(2, 3, 4, dtype=torch.int64), torch.ones(2, 4, 5, dtype=torch.int64)),
    ],
    ids=["known", "another device", "integers"],
)
def test_other_products_are_left(operands: tuple[Tensor, Tensor]) -> None:
    assert bmm_of_sizes_from_data(*operands) is NotImplemented
