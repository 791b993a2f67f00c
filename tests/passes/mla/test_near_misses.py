"""What looks like MLA but is not stays unchanged, with a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tests.passes import spellings as mla
from tests.passes.checks import check_right, unfolded
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SCALE, SQ, B, Function, N, P, R, T, V


def changed_keys(change: Function) -> Function:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        k_nope, v = mla.up_projected(latent, w_kv)
        return mla.softmax(mla.queries(x, w_q), torch.cat([change(k_nope), mla.to_heads(k_rope)], -1), v)

    return attention


def changed_values(change: Function) -> Function:
    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return mla.softmax(q, k, change(v))

    return attention


def changed_weights(change: Function) -> Function:
    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return change(((q @ k.transpose(-1, -2)) * SCALE).softmax(-1)) @ v

    return attention


def rotated(x: Tensor) -> Tensor:
    """A rope of `[..., T, P]`, each pair of columns with a frequency of its own."""
    frequency = 10.0 ** -torch.arange(P // 2).double().repeat(2)
    angle = torch.arange(x.shape[-2]).double()[:, None] * frequency
    return x * angle.cos() + torch.cat([-x[..., P // 2 :], x[..., : P // 2]], -1) * angle.sin()


def latent_of_each_head(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    own = latent[:, None] * torch.arange(1, N + 1)[:, None, None]
    w_uk, w_uv = mla.weights(w_kv)
    k = torch.cat([own @ w_uk.transpose(1, 2), mla.to_heads(k_rope)], -1)
    return mla.softmax(mla.queries(x, w_q), k, own @ w_uv.transpose(1, 2))


def llama(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Keys and values from one hidden state, all of the keys rotated."""
    k, v = mla.up_projected(latent, w_kv)
    return mla.softmax(rotated(mla.queries(x, w_q)[..., :P]), rotated(k), v)


def expanded_cache(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """The cache holds keys and values of every head."""
    q, k, v = mla.naive(x, latent, k_rope, w_q, w_kv)
    past = torch.ones(B, N, 3, P + R, dtype=x.dtype)
    return mla.softmax(q, torch.cat([past, k], 2), torch.cat([past, v], 2))


def unwritten_columns(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    k_nope, v = mla.up_projected(latent, w_kv)
    q = mla.queries(x, w_q)
    k = k_nope.new_empty(*k_nope.shape[:3], P + R + 1)
    k[..., :P] = k_nope
    k[..., P + 1 :] = k_rope[:, None]
    return mla.softmax(torch.cat([q, q[..., :1] * 0], -1), k, v)


def softmax_over_queries(*args: Tensor) -> Tensor:
    q, k, v = mla.naive(*args)
    return ((q @ k.transpose(-1, -2)) * SCALE).softmax(-2) @ v


def tokens_make_the_weight(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Another up-projection for every sequence."""
    w_uk, w_uv = mla.weights(w_kv)
    own = x[:, 0, :1, None, None]
    k = torch.einsum("btl,bnpl->bntp", latent, own * w_uk)
    v = torch.einsum("btl,bnvl->bntv", latent, own * w_uv)
    return mla.softmax(mla.queries(x, w_q)[..., :P], k, v)


def keys_of_each_head(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """SDPA with queries in the batch: each head of a query has the keys of tokens of its own."""
    q, k, v = mla.naive(x, latent, k_rope, w_q, w_kv)
    order = torch.stack([torch.stack([torch.arange(T).roll(i * n) for i in range(SQ)]) for n in range(N)])
    of_queries = (t[:, :, None].expand(-1, -1, SQ, -1, -1) for t in (k, v))
    k, v = (t.gather(3, order[..., None].expand(*t.shape)) for t in of_queries)
    return mla.sealed(q[..., None, :], k, v)[..., 0, :]


def experts(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """A router's softmax over two matrices: the products with these, which it weighs, differ for every token."""
    matrices = torch.stack([w_kv, w_kv.flip(0)])
    chosen = (latent @ matrices[:, :, 0].T).softmax(-1)
    return torch.einsum("bte,btl,elo->bto", chosen, latent, matrices)


def unfactored_batch(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Batch and heads are merged in one order for the attention weights, and in the other for the values."""
    q, k, v = mla.naive(x, latent, k_rope, w_q, w_kv)
    p = ((q @ k.transpose(-1, -2)) * SCALE).softmax(-1).reshape(B * N, SQ, T)
    return p @ v.transpose(0, 1).reshape(N * B, T, V)


NEAR_MISSES: dict[str, tuple[Function, str]] = {
    "a nonlinearity on the keys": (changed_keys(torch.tanh), "found `tanh`"),
    "a norm on the keys of each head": (changed_keys(lambda k: F.rms_norm(k, (P,))), "an up-projection of"),
    "a number added to the keys under a nonlinearity": (changed_keys(lambda k: (k + 1).relu()), "found `relu"),
    "a number that is not finite added to the keys": (changed_keys(lambda k: k - 1e400), "found `sub"),
    "rope on the nope part": (changed_keys(rotated), "an up-projection of"),
    "keys of flipped heads": (changed_keys(lambda k: k.flip(1)), "found `flip`"),
    "keys of heads of which some are changed": (
        changed_keys(lambda k: torch.cat([k[:, 2:].tanh(), k[:, :2]], 1)),
        "2 pieces",
    ),
    "keys of reversed tokens": (changed_keys(lambda k: k.flip(2)), "found `flip`"),
    "a gate of each key and head": (
        changed_keys(lambda k: k * torch.ones(N, T, 1).double().cumsum(1)),
        "an up-projection times `cumsum",
    ),
    "gated values": (
        changed_values(lambda v: v * torch.ones(N, T, V).double().cumsum(1).sigmoid()),
        "expected values that are an up-projection of a latent, found an up-projection times `sigmoid",
    ),
    "a norm of each head's key by hand": (
        changed_keys(
            lambda k: (k * (k.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()) * torch.ones(P).double().cumsum(0)
        ),
        "an up-projection of each head times `rsqrt` (rsqrt.default), which is computed from it as in a norm",
    ),
    "a norm of each head's value": (
        changed_values(lambda v: v / v.norm(dim=-1, keepdim=True)),
        "which is computed from it as in a norm",
    ),
    "values by more than a number holds": (changed_values(lambda v: v * 1e200 * 1e200), "values with a finite scale"),
    "a nonlinearity on the values": (changed_values(torch.relu), "found `relu`"),
    "keys rounded to FP8": (changed_keys(lambda k: k.to(torch.float8_e4m3fn).to(k.dtype)), "found `_to_copy"),
    "values rounded to FP8, by a scale": (
        changed_values(lambda v: (v * 100).to(torch.float8_e5m2).to(v.dtype) / 100),
        "found `div",
    ),
    "values of other heads": (changed_values(lambda v: v.roll(1, 1)), "found `roll`"),
    "Llama with rope on all of the keys": (llama, "an up-projection of"),
    "keys and values cached unfolded": (expanded_cache, "keys and values that are stored expanded"),
    "columns that nobody wrote": (unwritten_columns, "all of whose columns are written"),
    "softmax over the queries": (softmax_over_queries, "the keys of the softmax"),
    "a mixture of experts": (experts, "expected values that are an up-projection of a latent, found a product of"),
    "keys of each head": (keys_of_each_head, "found `gather"),
    "batch and heads merged in two orders": (unfactored_batch, "values to keep its axes"),
    "attention sinks": (
        lambda *a: mla.softmax(*mla.naive(*a)[:2], F.pad(mla.naive(*a)[2], (0, 0, 0, 1)), lambda s: F.pad(s, (0, 1))),
        "a sum of products",
    ),
    "some of the weights": (
        lambda *a: changed_weights(lambda p: p[..., :1].expand(-1, -1, -1, T))(*a),
        "found that only a part of them is",
    ),
    "dropout": (lambda *a: mla.sealed(*mla.naive(*a), dropout=0.5), "without dropout"),
    "one key": (
        lambda x, latent, k_rope, *w: mla.softmax(*mla.naive(x, latent[:, :1], k_rope[:, :1], *w)),
        "expected several keys",
    ),
}


@pytest.mark.parametrize(("function", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_a_near_miss_stays_as_it_is(function: Function, reason: str) -> None:
    module = capture(function, *mla.tensors())
    code = module.code
    before = seeded(module)
    (outcome,) = rewrite(module)
    assert outcome.path == "unchanged"
    assert outcome.reason.startswith("expected ")
    assert reason in outcome.reason
    assert not outcome.trail or outcome.trail[0].startswith("`")
    assert module.code == code
    if function is not unwritten_columns:  # what these hold is another number each time
        check_right(before, seeded(module))


def seeded(module: fx.GraphModule) -> Tensor:
    torch.manual_seed(0)  # of dropout
    return run(module, *mla.tensors())


@pytest.mark.parametrize("function", [latent_of_each_head, tokens_make_the_weight])
def test_a_latent_a_head_or_weights_of_each_sequence_are_groups(function: Function) -> None:
    """There are few of them, and each becomes an attention of its own."""
    module = capture(function, *mla.tensors())
    before = run(module, *mla.tensors())
    (outcome,) = rewrite(module)
    assert outcome.rewritten
    check_right(before, run(module, *mla.tensors()))


@pytest.mark.parametrize("path", ["absorbed", "chunked"])
def test_weights_that_are_returned_as_well_exist_and_keys_do_not(path: str) -> None:
    def attention(*args: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = mla.naive(*args)
        p = ((q @ k.transpose(-1, -2)) * SCALE).softmax(-1)
        return p @ v, p

    module = capture(attention, *mla.tensors())
    before = run(module, *mla.tensors())
    (outcome,) = rewrite(module, path)
    if path == "absorbed":
        assert outcome.path == "absorbed"
        assert not [node for node in unfolded(module) if node.meta["val"].shape[-1] not in (T, SQ)]
    else:
        assert outcome.path == "unchanged"
        assert (
            "expected attention weights that only the product with the values reads, found that "
            "they are also read by `output`"
        ) in outcome.reason
    for mine, theirs in zip(run(module, *mla.tensors()), before, strict=True):
        check_right(theirs, mine)


def test_what_one_op_multiplies_and_adds_to_is_still_added_where_weights_are_returned() -> None:
    def attention(*args: Tensor) -> tuple[Tensor, Tensor]:
        """`nn.MultiheadAttention` with `need_weights`, under a mask."""
        q, k, v = (t.flatten(0, 1) for t in mla.naive(*args))
        mask = torch.zeros(SQ, T).double().masked_fill(torch.ones(SQ, T).triu(T - SQ + 1) > 0, -torch.inf)
        p = torch.baddbmm(mask.expand(B * N, -1, -1), q, k.mT, beta=0.5, alpha=SCALE).softmax(-1)
        return p @ v, p.unflatten(0, (B, N)).mean(1)

    module = capture(attention, *mla.tensors())
    before = run(module, *mla.tensors())
    (outcome,) = rewrite(module, "absorbed")
    assert outcome.path == "absorbed"
    assert not [node for node in unfolded(module) if node.meta["val"].shape[-1] not in (T, SQ)]
    for mine, theirs in zip(run(module, *mla.tensors()), before, strict=True):
        check_right(theirs, mine)


def test_weights_that_meet_two_values_exist_once() -> None:
    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        p = ((q @ k.transpose(-1, -2)) * SCALE).softmax(-1)
        return torch.cat([p @ v[..., 2:], p @ v[..., :2]], -1)

    module = capture(attention, *mla.tensors())
    before = run(module, *mla.tensors())
    assert [outcome.path for outcome in rewrite(module)] == ["absorbed", "absorbed"]
    assert [node.target for node in module.graph.nodes].count(torch.ops.aten._softmax.default) == 1
    check_right(before, run(module, *mla.tensors()))


def test_weights_with_dropout_are_no_attention() -> None:
    module = capture(changed_weights(lambda p: F.dropout(p, 0.5, training=True)), *mla.tensors())
    (outcome,) = rewrite(module)
    assert outcome.path == "unchanged"
    assert "found them multiplied" in outcome.reason
    assert "dropout" in outcome.remedy
