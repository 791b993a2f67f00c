"""Keys whose columns an index names: queries take their place, and the keys are what they were before that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_compile
from tests.errors import assert_as_close_as_eager
from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_unchanged, compiled
from tests.passes.spellings import SQ, UNKNOWN, Function, N, P, R, T

ORDER = (3, 0, 5, 1, 4, 2)


def named(take: Function, index: tuple[int, ...] = ORDER, attend: Function = mla.softmax) -> tuple[Function, Tensor]:
    """MLA whose keys, `[B, N, T, P + R]`, are `take(keys, index)`, and the index, which is an input of the graph."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor, index: Tensor) -> Tensor:
        q, k, v = mla.naive(x, latent, k_rope, w_q, w_kv)
        k = take(k, index)
        return attend(q[..., : k.shape[-1]], k, v)

    return attention, torch.tensor(index)


def by_brackets(k: Tensor, index: Tensor) -> Tensor:
    return k[..., index]


REWRITTEN = {
    "by brackets": named(by_brackets),
    "index_select": named(lambda k, index: k.index_select(-1, index)),
    "from the end": named(by_brackets, (-1, 0, -3, 1, 2, -2)),
    "int32": named(lambda k, index: k.index_select(-1, index.int())),
    "fewer columns": named(by_brackets, (4, 1, 0)),
    "a column twice": named(by_brackets, (5, 0, 5, 1, 0, 2)),
    "an index of which some is used": named(lambda k, index: k[..., index[1:]]),
    "before heads": named(lambda k, index: k.transpose(1, 2)[..., index].transpose(1, 2)),
    "up-projected columns alone": named(lambda k, index: k[..., :P].contiguous()[..., index], (2, 0, 3, 1)),
    "a part of the columns": named(lambda k, index: k[..., index][..., 1:5]),
    "and a number on the scores": named(by_brackets, attend=lambda q, k, v: mla.softmax(q * 0.5, k, v)),
    "under a mask": named(by_brackets, attend=lambda q, k, v: mla.sealed(q, k, v, torch.ones(SQ, T).tril(2) > 0)),
    "under a soft cap": named(by_brackets, attend=lambda q, k, v: mla.softmax(q, k, v, lambda s: 3 * (s / 3).tanh())),
}


@pytest.mark.parametrize(("function", "index"), REWRITTEN.values(), ids=REWRITTEN)
def test_queries_take_the_place_of_columns(function: Function, index: Tensor) -> None:
    for path, _, (outcome,) in compiled(function, (*mla.tensors(), index)):
        assert outcome.path == path


@pytest.mark.parametrize("name", ["by brackets", "fewer columns", "up-projected columns alone"])
def test_no_tensor_of_heads_and_keys_is_left(name: str) -> None:
    function, index = REWRITTEN[name]
    check_rewritten(function, (*mla.tensors(), index))


def test_batch_and_lengths_may_be_unknown() -> None:
    function, index = REWRITTEN["by brackets"]
    check_rewritten(function, (*mla.tensors(), index), UNKNOWN)


UNCHANGED = {
    "of each head": named(
        lambda k, index: k.gather(-1, (index + torch.arange(N)[:, None, None]).remainder(P + R).expand_as(k))
    ),
    "after a function of the keys": named(lambda k, index: k.tanh()[..., index]),
    "before a function of the keys": named(lambda k, index: k[..., index].tanh()),
}


@pytest.mark.parametrize(("function", "index"), UNCHANGED.values(), ids=UNCHANGED)
def test_other_indices_stay(function: Function, index: Tensor) -> None:
    check_unchanged(function, (*mla.tensors(), index))


@pytest.mark.slow
@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled(dtype: torch.dtype) -> None:
    function, index = named(by_brackets, attend=torch.nn.functional.scaled_dot_product_attention)
    given = [tensor.to(dtype) for tensor in mla.tensors()]
    exact, eager = function(*(tensor.double() for tensor in given), index), function(*given, index)
    with torch.no_grad():
        result = torch.compile(function, backend="mla", options={"mla.strict": True})(*given, index)
    assert mla_compile.last_report().rewritten == 1
    assert_as_close_as_eager(result, eager, exact)
