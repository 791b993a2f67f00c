"""Zeros joined to keys and values along the tokens: a latent of zeros is up-projected to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes import spellings as mla
from tests.passes.checks import check_right, compiled
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SQ, UNKNOWN, Function, N, P, T, V

Edit = Callable[[Tensor], Tensor]


def null_key(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(*x.shape[:2], 1, x.shape[3]), x], 2)


def padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 2))


def on_both_sides(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :, :3]), x, torch.zeros_like(x[:, :, :1])], 2)


def shifted(x: Tensor) -> Tensor:
    """Each token has what the one before it had."""
    return torch.cat([torch.zeros_like(x[:, :, :1]), x[:, :, :-1]], 2)


def written(x: Tensor) -> Tensor:
    """Into a buffer of zeros."""
    buffer = x.new_zeros(*x.shape[:2], T + 3, x.shape[3])
    buffer[:, :, :T] = x
    return buffer


def edited(keys: Edit, values: Edit, mask: Tensor | None = None, rope: bool = True) -> Function:
    """MLA with keys and values that are made of the up-projected ones."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        q, k = (q, k) if rope else (q[..., :P], k[..., :P])
        return mla.sealed(q, keys(k), values(v), mask, scale=mla.SCALE)

    return attention


def but_for_last(count: int) -> Tensor:
    return (torch.arange(T + count) < T).expand(SQ, -1)


REWRITTEN: dict[str, Function] = {
    "a null key": edited(null_key, null_key),
    "a null key, no rope": edited(null_key, null_key, rope=False),
    "padding": edited(padded, padded),
    "padding, no rope": edited(padded, padded, rope=False),
    "on both sides": edited(on_both_sides, on_both_sides),
    "shifted": edited(shifted, shifted),
    "values shifted": edited(lambda k: k, shifted),
    "in a buffer": edited(written, written),
}
NEITHER: dict[str, Function] = {
    "other numbers": edited(lambda k: F.pad(k, (0, 0, 1, 0), value=0.5), lambda v: F.pad(v, (0, 0, 1, 0), value=0.5)),
    "a bias": edited(null_key, lambda v: null_key(v + torch.arange(V, dtype=v.dtype))),
    "a bias of each head": edited(null_key, lambda v: null_key(v + torch.arange(N * V, dtype=v.dtype).view(N, 1, V))),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("symbolic", [(), UNKNOWN], ids=["known sizes", "unknown sizes"])
@pytest.mark.parametrize("function", REWRITTEN.values(), ids=REWRITTEN)
def test_keys_and_values_have_a_latent_of_zeros(function: Function, symbolic: list[tuple[int, int]]) -> None:
    for path, _, (outcome,) in compiled(function, mla.tensors(), symbolic):
        assert outcome.path == path


def test_masks_hide_zeros_as_they_hid_them() -> None:
    def attention(mask: Tensor, *args: Tensor) -> Tensor:
        return edited(padded, padded, mask)(*args)

    for path, _, (outcome,) in compiled(attention, (but_for_last(2), *mla.tensors())):
        assert outcome.path == path


@pytest.mark.parametrize("function", NEITHER.values(), ids=NEITHER)
def test_what_is_not_0_is_none(function: Function) -> None:
    for _, _, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == "unchanged"


def test_a_null_key_alone_stays() -> None:
    """Values have no zeros beside those of the keys, but a key more."""

    def attention(extra: Tensor, *args: Tensor) -> Tensor:
        return edited(null_key, lambda v: torch.cat([extra, v], 2))(*args)

    extra = torch.ones(mla.B, N, 1, V, dtype=torch.float64)
    captured = capture(attention, extra, *mla.tensors())
    before = run(captured, extra, *mla.tensors())
    (outcome,) = rewrite(captured)
    assert outcome.path == "unchanged"
    check_right(before, run(captured, extra, *mla.tensors()))
