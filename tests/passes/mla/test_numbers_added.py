"""Python numbers that are added to keys and values are biases, as tensors of one number are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.errors import assert_as_close_as_eager
from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_unchanged
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SCALE, Function, N, P, V

aten = torch.ops.aten


def same(tensor: Tensor) -> Tensor:
    return tensor


def added(to_nope: Function = same, to_values: Function = same, attend: Function = mla.softmax) -> Function:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        k_nope, v = mla.up_projected(latent, w_kv)
        k = torch.cat([to_nope(k_nope), mla.to_heads(k_rope)], -1)
        return attend(mla.queries(x, w_q), k, to_values(v))

    return attention


def to_whole_keys(change: Function) -> Function:
    return lambda *args: (lambda q, k, v: mla.softmax(q, change(k), v))(*mla.naive(*args))


def added_to_gated(change: Function) -> Function:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        gate = latent[:, None, :, :1].sigmoid()
        k_nope, v = mla.up_projected(latent, w_kv)
        k = torch.cat([change(k_nope * gate), mla.to_heads(k_rope)], -1)
        return mla.sealed(mla.queries(x, w_q), k, change(v * gate))

    return attention


def before_the_split(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    up = (latent @ w_kv + 0.5).unflatten(2, (N, P + V)).transpose(1, 2)
    k = torch.cat([up[..., :P], mla.to_heads(k_rope)], -1)
    return mla.sealed(mla.queries(x, w_q), k, up[..., P:])


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mla.softmax(q, k, v, lambda scores: 5 * torch.tanh(scores / 5))


def with_a_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """To the score of the sink, numbers on keys add nothing."""
    scores = (q @ k.mT) * SCALE
    sink = torch.arange(N).to(q.dtype).view(1, N, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v


REWRITTEN: dict[str, Function] = {
    "to the values": added(to_values=lambda v: v + 1.5),
    "to the values, an integer": added(to_values=lambda v: v - 2),
    "to the nope keys": added(lambda k: k + 1.5),
    "to the whole keys": to_whole_keys(lambda k: k + 1.5),
    "taken from": added(lambda k: 1.5 - k, lambda v: 2 - v),
    "times a factor": added(to_values=lambda v: torch.rsub(v, 3.0, alpha=2)),
    "by ops of scalars": added(lambda k: aten.sub.Scalar(k, 1.5, 2), lambda v: aten.add.Scalar(v, 1.5, 2)),
    "from a scalar by its op": added(to_values=lambda v: aten.rsub.Scalar(v, 1.5, 2)),
    "beside a tensor": added(to_values=lambda v: (v + torch.arange(V).double()) * 2 + 0.5),
    "before the split": before_the_split,
    "zero": added(lambda k: k + 0, lambda v: 0 + v),
    "zero, to a gated up-projection": added_to_gated(lambda tensor: 0 + tensor),
    "zero, taken from a gated up-projection": added_to_gated(lambda tensor: tensor - 0.0),
    "Python's sum of gated up-projections": added_to_gated(lambda tensor: sum([tensor, tensor * 2])),
}


@pytest.mark.parametrize("function", REWRITTEN.values(), ids=REWRITTEN)
def test_numbers_are_biases(function: Function) -> None:
    check_rewritten(function, mla.tensors())


@pytest.mark.parametrize("attend", [capped, with_a_sink])
def test_a_number_on_keys_counts_where_scores_are_more_than_shifted(attend: Function) -> None:
    function = added(lambda k: k + 1.5, lambda v: v + 1.5, attend)
    inputs = [tensor.float() for tensor in mla.tensors()]
    module = capture(function, *inputs)
    (outcome,) = rewrite(module)
    assert outcome.path == "absorbed"
    assert_as_close_as_eager(run(module, *inputs), function(*inputs), function(*(tensor.double() for tensor in inputs)))


def test_sizes_may_be_unknown() -> None:
    check_rewritten(before_the_split, mla.tensors(), mla.UNKNOWN)


def test_weights_in_8_bits() -> None:
    """The number is not rounded to whole ones, as the weights are."""

    def attention(x: Tensor, latent: Tensor, w_q: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        k, v = mla.up_projected(latent, weight.to(latent.dtype).T * scale)
        return mla.softmax(mla.queries(x, w_q)[..., :P], k, v + 1.5)

    x, latent, _, w_q, w_kv = mla.tensors()
    weight = (w_kv.T * 50).round().clamp(-127, 127).to(torch.int8)
    check_rewritten(attention, (x, latent, w_q, weight, torch.full((w_kv.shape[1],), 0.02).double()))


def test_a_number_of_each_key_is_none() -> None:
    check_unchanged(added(to_values=lambda v: v + torch.arange(v.shape[2]).double()[:, None]), mla.tensors())
