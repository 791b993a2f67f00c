"""The report says how much of a cache that grows by `cat` each step copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_compile
from tests.models import HIDDEN, Combined, Inference, L, R

pytestmark = pytest.mark.usefixtures("without_codegen")
SAVED = "a cache that is written in place avoids this (mla_compile.LatentCache)"


def past(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(2, tokens, L, dtype=dtype), torch.randn(2, tokens, R, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latents_and_rope_keys_that_grow_are_copied(dtype: torch.dtype) -> None:
    report = mla_compile.explain(Combined().to(dtype), torch.randn(2, 1, HIDDEN, dtype=dtype), past(9, dtype))
    size = (L + R) * dtype.itemsize
    assert [site.hint for site in report.sites] == [
        (f"each step copies the whole cache, {size} bytes per token: {SAVED}")
    ]
    assert str(report).endswith(f"\n\n0: {report.sites[0].hint}")


def test_a_cache_that_is_not_kept_or_not_copied_is_not_spoken_of() -> None:
    def forgotten(x: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        return module(x, cache)[0]

    module, x = Combined(), torch.randn(2, 1, HIDDEN)
    in_place = Inference()
    buffers = in_place.empty_cache(2) | {"start": 9}
    for report in (mla_compile.explain(forgotten, x, past(9)), mla_compile.explain(in_place, x, buffers)):
        assert [(site.rewritten, site.hint) for site in report.sites] == [(True, "")]
