"""Keys and values that are set to 0 for some tokens, or projected by another weight: a choice between latents and 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, compiled, unfolded
from tests.passes.graphs import capture, rewrite, run
from tests.passes.mla.test_gated import gated
from tests.passes.spellings import UNKNOWN, Function, L, N, P, R, T, V, sealed
from tests.training import assert_every_gradient


def padding(latent: Tensor) -> Tensor:
    """A bool of each key, `[B, T]`."""
    return latent[..., 0] > 0.3


def chosen(keys: Function, values: Function, **options: Function | bool) -> Function:
    return gated(padding, keys=keys, values=values, **options)


def filled(tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.masked_fill(mask, 0.0)


def filled_before_heads(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    kv = (latent @ w_kv).masked_fill(padding(latent)[..., None], 0.0)
    k, v = kv.unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], -1)
    return sealed(mla.queries(x, w_q), torch.cat([k, mla.to_heads(k_rope)], -1), v)


def assigned(tensor: Tensor, mask: Tensor) -> Tensor:
    tensor = tensor.transpose(1, 2).clone()  # [B, T, N, P or V]
    tensor[mask[:, 0, :, 0]] = 0.0
    return tensor.transpose(1, 2)


def assigned_before_heads(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    kv = latent @ w_kv
    kv[~padding(latent)] = 0.0
    k, v = kv.unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], -1)
    return sealed(mla.queries(x, w_q), torch.cat([k, mla.to_heads(k_rope)], -1), v)


def filled_beside_a_cache(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """The last rope keys are projected, and those before come as they are."""
    k, v = mla.up_projected(latent, w_kv)
    k_rope = torch.cat([k_rope[:, :-2], latent[:, -2:] @ w_kv[:, :R]], 1)
    mask = padding(latent)[:, None, :, None]
    return sealed(mla.queries(x, w_q), filled(torch.cat([k, mla.to_heads(k_rope)], -1), mask), filled(v, mask))


CHOSEN: dict[str, Callable[..., Tensor]] = {
    "filled": chosen(filled, filled),
    "filled with all of the keys": chosen(filled, filled, whole=True),
    "filled before heads are split off": filled_before_heads,
    "filled beside a cache": filled_beside_a_cache,
    "where": chosen(lambda k, m: torch.where(m, k, 0), lambda v, m: torch.where(m, v, torch.zeros_like(v))),
    "where, and where not": chosen(lambda k, m: torch.where(m, 0.0, k), lambda v, m: torch.where(~m, v, 0.0)),
    "times a number": chosen(lambda k, m: filled(k, m) * 0.5, lambda v, m: filled(2 * v, m)),
    "a tensor of 0": chosen(*[lambda t, m: t.masked_fill(m, torch.tensor(0.0).double())] * 2),
    "assigned": chosen(assigned, assigned),
    "assigned before heads are split off": assigned_before_heads,
    "softmax by hand": chosen(filled, filled, attend=mla.softmax),
}


@pytest.mark.parametrize("function", CHOSEN.values(), ids=CHOSEN)
def test_the_latent_is_set_to_zero_instead(function: Function) -> None:
    check_rewritten(function, mla.tensors())


def two_weights(attend: Function) -> Function:
    """Tokens of two kinds, as text and images, whose latents are up-projected by a weight each."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        of_image = padding(latent)[:, None, :, None]
        pairs = zip(mla.up_projected(latent, w_kv), mla.up_projected(latent, w_kv.flip(0) * 2), strict=True)
        k, v = (torch.where(of_image, *pair) for pair in pairs)
        return attend(mla.queries(x, w_q), torch.cat([k, mla.to_heads(k_rope)], -1), v)

    return attention


@pytest.mark.parametrize("path", ["absorbed", "chunked"])
@pytest.mark.parametrize("function", [two_weights(sealed), chosen(lambda k, _: k, filled)], ids=["weights", "values"])
def test_there_are_two_latents_where_one_does_not_do(function: Function, path: str) -> None:
    for _, module, (outcome,) in compiled(function, mla.tensors(), paths=[path]):
        assert outcome.path == path
        assert (outcome.shapes["L"], outcome.shapes.get("Lk")) in [(str(2 * L), None), (str(L), str(L))]
        assert not unfolded(module)


@pytest.mark.parametrize("path", ["absorbed", "chunked"])
@pytest.mark.parametrize("function", CHOSEN.values(), ids=CHOSEN)
def test_what_is_set_to_zero_may_be_nan(function: Function, path: str) -> None:
    """All queries see these keys, whose scores are those of the rope keys alone."""
    x, latent, *rest = mla.tensors()
    kept = function in (CHOSEN["where"], assigned_before_heads)
    latent[..., 1:].masked_fill_(padding(latent)[..., None] == (not kept), torch.nan)
    module = capture(function, x, latent, *rest)
    before = run(module, x, latent, *rest)
    (outcome,) = rewrite(module, path)
    assert outcome.path == path
    assert before.isfinite().all()
    torch.testing.assert_close(run(module, x, latent, *rest), before)


@pytest.mark.parametrize("function", [CHOSEN["filled"], CHOSEN["assigned"], two_weights(sealed)])
def test_sizes_may_be_unknown(function: Function) -> None:
    for path, module, (outcome,) in compiled(function, mla.tensors(), UNKNOWN):
        assert outcome.path == path
        assert not unfolded(module)


class Filled(nn.Module):
    forward = staticmethod(chosen(filled, filled, attend=mla.softmax))


class OfTwoKinds(nn.Module):
    forward = staticmethod(two_weights(mla.softmax))


@pytest.mark.parametrize("module", [Filled, OfTwoKinds])
def test_they_are_trained(module: type[nn.Module]) -> None:
    trained = assert_every_gradient(module(), [*mla.tensors()])
    assert [outcome.path for outcome in trained.outcomes] == ["chunked"]


BY_A_SIZE: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "filled with it": lambda t, m, size: t.masked_fill(m, size),
    "divided by it": lambda t, m, size: t / size,
    "divided by it and filled": lambda t, m, size: filled(t / size, m),
    "filled and multiplied by it": lambda t, m, size: filled(t, m) * size,
}


@pytest.mark.parametrize("change", BY_A_SIZE.values(), ids=BY_A_SIZE)
def test_a_size_that_is_unknown_is_no_tensor(change: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    def function(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        kv = change(latent @ w_kv, padding(latent)[..., None], latent.shape[1])
        k, v = kv.unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], -1)
        return sealed(mla.queries(x, w_q), torch.cat([k, mla.to_heads(k_rope)], -1), v)

    (outcome,) = rewrite(capture(function, *mla.tensors(), symbolic=UNKNOWN))
    assert outcome.path == "unchanged"
    assert "expected values that are an up-projection of a latent" in outcome.reason


UNCHANGED: dict[str, Function] = {
    "another number": chosen(filled, lambda v, m: v.masked_fill(m, 1.0)),
    "a value that is learned": chosen(filled, lambda v, m: torch.where(m, v, torch.arange(V).double())),
    "of some heads": chosen(filled, lambda v, _: v.masked_fill((torch.arange(N) == 1)[:, None, None], 0.0)),
    "some columns": chosen(filled, lambda v, _: v.masked_fill(torch.arange(V) == 1, 0.0)),
    "of each head and key": chosen(filled, lambda v, _: v.masked_fill(torch.ones(N, T).tril().bool()[..., None], 0.0)),
    "negative numbers": chosen(filled, lambda v, _: torch.where(v > 0, v, 0.0)),
}


@pytest.mark.parametrize("function", UNCHANGED.values(), ids=UNCHANGED)
def test_a_near_miss_stays_as_it_is(function: Function) -> None:
    (outcome,) = rewrite(capture(function, *mla.tensors()))
    assert outcome.path == "unchanged"
    assert "expected values that are an up-projection of a latent" in outcome.reason


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch 2.15 says that both have the same length")
def test_a_mask_of_another_length_is_not_what_is_stored() -> None:
    """Nothing says that a bool index has as many elements as there are keys, if both are symbols."""

    def function(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor, named: Tensor) -> Tensor:
        latent, k_rope = (torch.cat([tensor, tensor[:, :1]], 1) for tensor in (latent, k_rope))
        kv = latent @ w_kv
        kv[named] = 0.0
        k, v = kv.unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], -1)
        return sealed(mla.queries(x, w_q), torch.cat([k, mla.to_heads(k_rope)], -1), v)

    tensors = mla.tensors()
    named = torch.ones(len(tensors[1]), T + 1, dtype=torch.bool)
    (outcome,) = rewrite(capture(function, *tensors, named, symbolic=[*UNKNOWN, (), (), (0, 1)]))
    assert outcome.path == "unchanged"
    assert "expected values that are an up-projection of a latent, found `index_put`" in outcome.reason
