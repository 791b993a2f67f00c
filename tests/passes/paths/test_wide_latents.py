"""A latent that is not less than half as wide as what it expands to is not worth keeping for many queries."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.passes.checks import check_right
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import sealed

B, TOKENS, HEADS, WIDTH, P, V = 1, 160, 6, 48, 30, 33


def attention(latent: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
    """`w_uk [N, P, L]` and `w_uv [N, V, L]`, for as many heads as have keys, or values, of their own."""
    k, v = (torch.einsum("btl,ndl->bntd", latent, w) for w in (w_uk, w_uv))
    k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
    return sealed(k.sin(), k, v, causal=True)


def given(key_heads: int, value_heads: int) -> list[Tensor]:
    shapes = (B, TOKENS, WIDTH), (key_heads, P, WIDTH), (value_heads, V, WIDTH)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


FOUND = {
    (1, 1): "found width 48 for keys of 1 x 30 and values of 1 x 33",
    (1, 2): "found width 48 for keys of 1 x 30 and values of 2 x 33",
    (2, 1): "found width 48 for keys of 2 x 30 and values of 1 x 33",
    (2, 2): "",
    (6, 1): "",
    (1, 6): "",
    (6, 6): "",
}
"""For numbers of heads that have keys and values of their own, why the attention stays."""


@pytest.mark.parametrize(("heads", "reason"), FOUND.items())
def test_heads_that_share_keys_or_values_count_once(heads: tuple[int, int], reason: str) -> None:
    tensors = given(*heads)
    module = capture(attention, *tensors)
    before = run(module, *tensors)
    (outcome,) = rewrite(module, "auto", 1024)
    assert outcome.path == ("unchanged" if reason else "chunked")
    assert reason in outcome.reason
    check_right(before, run(module, *tensors))


@pytest.mark.parametrize(("heads", "path"), [((1, 1), "unchanged"), ((6, 6), "chunked")])
@pytest.mark.parametrize("symbolic", [((2,), (2,), (2,)), ((1, 2), (1, 2), (1, 2))])
def test_widths_that_are_symbols_count_as_they_are_now(
    heads: tuple[int, int], path: str, symbolic: Sequence[Sequence[int]]
) -> None:
    (outcome,) = rewrite(capture(attention, *given(*heads), symbolic=symbolic), "auto", 1024)
    assert outcome.path == path
    assert path != "unchanged" or "less than half as wide" in outcome.reason


@pytest.mark.parametrize("path", ["absorbed", "chunked"])
def test_a_path_that_is_asked_for_is_taken(path: str) -> None:
    (outcome,) = rewrite(capture(attention, *given(1, 1)), path)
    assert outcome.path == path
