"""Float16 holds little: numbers that hide scores, scales of a part of the keys, and latents may be beyond it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_compile
from tests.errors import assert_as_close_as_eager

N, P, R, V, L, KEYS = 4, 8, 4, 8, 16, 24
PATHS = pytest.mark.parametrize("path", ["absorbed", "chunked"])


def inputs() -> list[Tensor]:
    """Queries, latents, rope keys and the weight."""
    torch.manual_seed(0)
    shapes = (2, N, 5, P + R), (2, KEYS, L), (2, KEYS, R), (N * (P + V), L)
    return [torch.randn(shape).half() for shape in shapes]


def up_projected(latent: Tensor, weight: Tensor) -> Sequence[Tensor]:
    return F.linear(latent, weight).unflatten(-1, (N, P + V)).transpose(1, 2).split([P, V], -1)


def check(attend: Callable[..., Tensor], path: str, *given: Tensor) -> None:
    compiled = torch.compile(attend, backend="mla", options={"mla.path": path})(*given)
    exact = attend(*(t.double() if t.is_floating_point() else t for t in given))
    assert_as_close_as_eager(compiled, attend(*given), exact, factor=4.0)
    assert [site.path for site in mla_compile.last_report().sites] == [path]


@PATHS
@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("added", [False, True], ids=["replaced", "added"])
@pytest.mark.parametrize("fill", [-1e4, torch.finfo(torch.float16).min], ids=["-1e4", "least float16"])
def test_keys_of_a_row_that_a_number_hides_everywhere_weigh_the_same(fill: float, added: bool, path: str) -> None:
    def attend(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, seen: Tensor) -> Tensor:
        k, v = up_projected(latent, weight)
        k = torch.cat([k, k_rope[:, None].expand(-1, N, -1, -1)], -1)
        scores = q @ k.mT * 0.3
        if added:
            return (scores + torch.zeros_like(scores[:1, :1]).masked_fill(~seen, fill)).softmax(-1) @ v
        return scores.masked_fill(~seen, fill).softmax(-1) @ v

    seen = torch.ones(5, KEYS, dtype=torch.bool).tril(KEYS - 5)
    seen[1] = False
    check(attend, path, *inputs(), seen)


@PATHS
@pytest.mark.usefixtures("without_codegen")
def test_a_part_of_the_keys_may_have_a_far_smaller_scale(path: str) -> None:
    def attend(q: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
        k, v = up_projected(latent, weight)
        return (q[..., :P] @ k.mT * 1e-4 + q[..., P:] @ k_rope[:, None].mT * 0.3).softmax(-1) @ v

    q, *others = inputs()
    check(attend, path, q * 16, *others)


@PATHS
@pytest.mark.usefixtures("without_codegen")
def test_the_latent_of_the_keys_may_be_wider_than_that_of_the_values(path: str) -> None:
    def attend(q: Tensor, of_keys: Tensor, of_values: Tensor, k_rope: Tensor, weight: Tensor) -> Tensor:
        k, _ = up_projected(of_keys, weight.to(of_keys.dtype) / 2**20)
        _, v = up_projected(of_values, weight)
        k = torch.cat([k.to(q.dtype), k_rope[:, None].expand(-1, N, -1, -1)], -1)
        return F.scaled_dot_product_attention(q, k, v)

    q, latent, *others = inputs()
    check(attend, path, q, latent.flip(1).float() * 2**20, latent, *others)
