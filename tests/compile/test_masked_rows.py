"""Rows that a finite number hides everywhere, in float16: what takes the place of the number is beyond that dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_compile
from tests.errors import assert_as_close_as_eager

N, P, R, V, L, KEYS = 4, 8, 4, 8, 16, 24


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("path", ["absorbed", "chunked"])
@pytest.mark.parametrize("fill", [-1e4, torch.finfo(torch.float16).min], ids=["-1e4", "least float16"])
def test_their_keys_weigh_the_same(fill: float, path: str) -> None:
    def attend(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, seen: Tensor) -> Tensor:
        k, v = F.linear(latent, weight).unflatten(-1, (N, P + V)).transpose(1, 2).split([P, V], -1)
        k = torch.cat([k, k_rope[:, None].expand(-1, N, -1, -1)], -1)
        return (q @ k.mT * 0.3).masked_fill(~seen, fill).softmax(-1) @ v

    torch.manual_seed(0)
    shapes = (2, N, 5, P + R), (2, KEYS, L), (2, KEYS, R), (N * (P + V), L)
    given = [torch.randn(shape).half() for shape in shapes]
    seen = torch.ones(5, KEYS, dtype=torch.bool)
    seen[1] = False
    compiled = torch.compile(attend, backend="mla", options={"mla.path": path})(*given, seen)
    assert_as_close_as_eager(compiled, attend(*given, seen), attend(*(t.double() for t in given), seen), factor=4.0)
    assert [site.path for site in mla_compile.last_report().sites] == [path]
