"""Changes to MLA that are found in people's code: each is rewritten or left unchanged, and its result stays right."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tests.errors import assert_as_close_as_eager
from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_right, compiled, unfolded
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import SCALE, SQ, B, Function, L, N, P, R, T, V


def scored(change: Function) -> Function:
    """MLA by hand, with `change` applied to its scores."""
    return lambda *args: mla.softmax(*mla.naive(*args), change)


def hidden(blind: bool = False, shift: int = 0) -> Tensor:
    """True for keys after a query's position plus `shift`, and for all keys of the second query if it is `blind`."""
    rows = torch.arange(SQ)[:, None]
    return (torch.arange(T) - shift > rows + T - SQ) | (blind & (rows == 1))


def filled(number: float, blind: bool = False, shift: int = 0) -> Function:
    return lambda scores: scores.masked_fill(hidden(blind, shift), number)


def assigned(blind: bool = False, number: float = -torch.inf) -> Function:
    """`scores[mask] = number`"""

    def change(scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[hidden(blind).expand(scores.shape)] = number
        return scores

    return change


def put(number: float, accumulate: bool = False) -> Function:
    """What torch before 2.15 traces for `scores[mask] = number`; later versions fill instead."""
    return lambda s: s.index_put((hidden().expand(s.shape),), torch.tensor(number).double(), accumulate)


def heads() -> Tensor:
    """One number per head, [N, 1, 1]."""
    return torch.arange(1, N + 1)[:, None, None].double() / N


def own_head_assigned(scores: Tensor) -> Tensor:
    """Assigned at a mask over heads and sequences: head b of sequence b attends to all keys alike."""
    scores = scores.transpose(0, 1).clone()
    scores[torch.arange(N)[:, None] == torch.arange(B)] = -1e30
    return scores.transpose(0, 1)


def scaled_apart(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """One scale per head for the first product, another for the second, and a third for their sum."""
    q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
    k_nope, v = mla.up_projected(latent, w_kv)
    scores = (q_nope @ k_nope.mT * heads() + q_rope @ mla.to_heads(k_rope).mT * heads().flip(0)) / heads().exp()
    return scores.softmax(-1) @ v


def absorbed(keys: bool, values: bool, *, joined: bool = False, make: Function = lambda c: c) -> Function:
    """MLA absorbed by hand for the keys, the values or both, over the latent `make(latent)`.

    `joined`: latent and rope key are one tensor, for one product of scores.
    """

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        latent = make(latent)
        k_nope, v = mla.up_projected(latent, w_kv)
        w_uk, w_uv = mla.weights(w_kv)
        q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
        shared = latent[:, None]
        q, k, v = (q_nope @ w_uk if keys else q_nope), (shared if keys else k_nope), (shared if values else v)
        if joined:
            q, k = torch.cat([q, q_rope], -1), torch.cat([latent, k_rope], -1)[:, None]
            scores = q @ k.mT
        else:
            scores = q @ k.mT + q_rope @ k_rope[:, None].mT
        o = (scores * SCALE).softmax(-1) @ v
        return o @ w_uv.mT if values else o

    return attention


def in_one_cache(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Rope key and latent in one tensor: all of it is the keys, the latent's part is the values."""
    w_uk, w_uv = mla.weights(w_kv)
    cache = torch.cat([torch.cat([k_rope, latent], -1)[:, SQ:], x[..., : R + L]], 1)
    q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
    o = mla.softmax(torch.cat([q_rope, q_nope @ w_uk], -1), cache[:, None], cache[:, None, :, R:])
    return o @ w_uv.mT


def over_tokens(latent: Tensor) -> Tensor:
    """Each latent, mixed with those of earlier tokens."""
    return torch.arange(T * T).view(T, T).double().tril() / T**2 @ latent


def normed_product(latent: Tensor) -> Tensor:
    """A latent as a layer computes it in one step: projected, divided by its norm, and multiplied by a weight."""
    c = torch.cat([latent, latent], -1) @ torch.ones(2 * L, L).double().tril()
    return c * c.pow(2).mean(-1, keepdim=True).rsqrt() * torch.arange(1, L + 1).double()


def padded(before: int, after: int, *, cut: bool = True, sdpa: bool = True) -> Function:
    """Values padded with columns of zeros; `cut`: these are cut off the output."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        v = F.pad(v, (before, after))
        o = mla.sealed(q, k, v) if sdpa else mla.softmax(q, k, v)
        return o[..., before : before + V] if cut else o

    return attention


def padded_blind(*args: Tensor) -> Tensor:
    """Values padded with zeros. All columns are NaN, these too, where a query sees nothing."""
    q, k, v = mla.naive(*args)
    return mla.softmax(q, k, F.pad(v, (0, 3)), filled(-torch.inf, blind=True))


def powers(power: Function, divide: Function, change: Function = lambda s: s) -> Function:
    """A softmax by hand: `power` of the changed scores, and `divide`, which makes weights of these powers."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        e = power(change(q @ k.mT * SCALE))
        return divide(e) @ v

    return attention


def by_log_sum_exp(change: Function) -> Function:
    """Weights by a log-sum-exp, which `change` changes; it is -inf where a query sees nothing."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        scores = filled(-torch.inf, blind=True)(q @ k.mT * SCALE)
        return (scores - change(scores.logsumexp(-1, keepdim=True))).exp() @ v

    return attention


def infinite(sums: Tensor) -> Tensor:
    sums = sums.clone()
    sums[sums == -torch.inf] = torch.inf
    return sums


def over_sum(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True)


def shifted(scores: Tensor) -> Tensor:
    return scores - scores.amax(-1, keepdim=True)


REWRITTEN: dict[str, Function] = {
    "exp2": powers(lambda s: torch.exp2(s * 1.4426950408889634), over_sum),
    "exp2 under a mask": powers(torch.exp2, over_sum, lambda s: shifted(filled(-torch.inf)(s))),
    "exp2, -1e4 in a row of nothing else": powers(torch.exp2, over_sum, lambda s: shifted(filled(-1e4, blind=True)(s))),
    "a power of 3": powers(lambda s: 3**s, over_sum),
    "scores filled with -1e4": scored(filled(-1e4)),
    "a row of nothing but -1e4": scored(filled(-1e4, blind=True)),
    "a row of nothing but -1e4, chosen by where": scored(
        lambda s: torch.where(hidden(blind=True), torch.full((), -1e4).double(), s)
    ),
    "-1e4 before the scale": scored(lambda s: filled(-1e4, blind=True)(s * 3) / 4),
    "-1e4 twice": scored(lambda s: filled(-1e4, shift=-1)(filled(-1e4, blind=True)(s))),
    "a scale that is a tensor": scored(lambda s: s * torch.full((), 1.5).double()),
    "a scale a head": scored(lambda s: s * heads()),
    "a divisor a head, under a mask": scored(lambda s: filled(-torch.inf)(s / heads())),
    "a scale a query": scored(lambda s: torch.arange(1, SQ + 1)[:, None] * s / 4),
    "two scales that are tensors": scored(lambda s: s * heads() / torch.arange(1, SQ + 1)[:, None].double()),
    "scales of two products": scaled_apart,
    "values padded to the width of keys": padded(0, 4),
    "zeros before the values": padded(2, 0),
    "zeros on both sides": padded(2, 2, cut=False),
    "zeros that are NaN in a row of nothing": padded_blind,
    "values padded by hand": padded(1, 3, sdpa=False),
    "rows of nothing are 0 by a sum of inf": by_log_sum_exp(infinite),
    "rows of nothing are 0 by a sum of 1": by_log_sum_exp(lambda s: s.masked_fill(s == -torch.inf, 0.0)),
    "rows of nothing are 0 by another sum": by_log_sum_exp(lambda s: torch.where(s == -torch.inf, torch.inf, s)),
    "scores assigned at a mask": scored(assigned()),
    "scores put at a mask": scored(put(-torch.inf)),
    "rows of nothing assigned": scored(assigned(blind=True)),
    "scores of some sequences and heads assigned": scored(own_head_assigned),
    "-inf, then -1e4 over some of it": scored(lambda s: filled(-1e4, blind=True)(filled(-torch.inf, shift=-1)(s))),
}


ABSORBED: dict[str, Function] = {
    "by hand": absorbed(keys=True, values=True),
    "by hand, of one product": absorbed(keys=True, values=True, joined=True),
    "by hand, of one cache": in_one_cache,
    "the keys": absorbed(keys=True, values=False),
    "the keys, of one product": absorbed(keys=True, values=False, joined=True),
    "the values": absorbed(keys=False, values=True),
    "a latent with others before it": absorbed(keys=True, values=True, make=over_tokens),
    "a normed product": absorbed(keys=True, values=True, make=normed_product),
    "a latent that is a product": absorbed(
        keys=True, values=True, joined=True, make=lambda c: torch.cat([c, c], -1) @ torch.eye(2 * L)[:, :L].double()
    ),
}
"""Absorbed by hand, wholly or for one side: only the absorbed path is left."""


@pytest.mark.parametrize("function", ABSORBED.values(), ids=ABSORBED)
def test_what_is_absorbed_already_attends_to_the_latent(function: Function) -> None:
    for _, module, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == "absorbed"
        assert outcome.shapes["L"] == str(L)
        assert not unfolded(module)


def convolved(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Channels before tokens, as in code for images: the up-projection is a convolution with a kernel of size 1."""
    up = F.conv1d(latent.mT, w_kv.mT[..., None]).unflatten(1, (N, P + V))
    k_nope, v = up[:, :, :P], up[:, :, P:]
    q, k = mla.queries(x, w_q), torch.cat([k_nope, mla.to_heads(k_rope).mT], 2)
    return (v @ (q @ k * SCALE).softmax(-1).mT).mT


def test_a_convolution_of_one_place_is_an_up_projection() -> None:
    check_rewritten(convolved, mla.tensors())


SOFTLY = 3 * torch.pi


def softly(scores: Tensor) -> Tensor:
    return torch.tanh(scores / SOFTLY) * SOFTLY


@pytest.mark.parametrize("keys", [True, False])
def test_half_of_it_is_regrouped_around_a_function_of_the_scores(keys: bool) -> None:
    def function(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        w_uk, w_uv = mla.weights(w_kv)
        k_nope, v = mla.up_projected(latent, w_kv)
        q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
        shared = latent[:, None]
        scores = (q_nope @ w_uk) @ shared.mT if keys else q_nope @ k_nope.mT
        p = softly(scores + q_rope @ k_rope[:, None].mT).softmax(-1)
        return p @ v if keys else p @ shared @ w_uv.mT

    captured = capture(function, *mla.tensors())
    before = run(captured, *mla.tensors())
    (outcome,) = rewrite(captured, "absorbed")
    assert outcome.path == "absorbed"
    check_right(before, run(captured, *mla.tensors()))


@pytest.mark.parametrize("function", REWRITTEN.values(), ids=REWRITTEN)
def test_both_paths_are_taken_and_right(function: Function) -> None:
    check_rewritten(function, mla.tensors())


def before_all_keys(scores: Tensor) -> Tensor:
    """Scores under a causal mask of the dtype's lowest number, whose first query comes before all keys."""
    late = torch.arange(T)[None, :] >= torch.arange(SQ)[:, None]
    return scores + torch.zeros(SQ, T).to(scores.dtype).masked_fill(late, torch.finfo(scores.dtype).min)


@pytest.mark.parametrize("mask", [filled(torch.finfo(torch.float32).min, blind=True), before_all_keys])
def test_the_lowest_number_is_infinite_once_it_is_multiplied(mask: Function) -> None:
    """For a softmax in base 2, the masked scores are multiplied by log2(e): a row of nothing else becomes NaN."""
    tensors = [tensor.float() for tensor in mla.tensors()]
    function = powers(torch.exp2, over_sum, lambda s: shifted(mask(s) * 1.4426950408889634))
    expected = function(*tensors)
    assert expected.isnan().any()
    exact = function(*mla.tensors())
    for path in ("absorbed", "chunked"):
        captured = capture(function, *tensors)
        (outcome,) = rewrite(captured, path)
        assert outcome.rewritten
        actual = run(captured, *tensors)
        assert torch.equal(actual.isnan(), expected.isnan())
        assert_as_close_as_eager(actual, expected, exact)


NO_SOFTMAX: dict[str, Function] = {
    "a least sum": powers(torch.exp, lambda e: e / e.sum(-1, keepdim=True).clamp_min(1e-6)),
    "a number added, of powers of 2": powers(torch.exp2, lambda e: e / (e.sum(-1, keepdim=True) + 1e-6), shifted),
    "normalized": powers(torch.exp, lambda e: F.normalize(e, p=1, dim=-1)),
}


@pytest.mark.parametrize("function", NO_SOFTMAX.values(), ids=NO_SOFTMAX)
def test_weights_that_do_not_add_up_to_1_are_no_softmax(function: Function) -> None:
    for _, _, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == "unchanged"
        assert "expected attention weights that add up to 1, found them divided by `" in outcome.reason


def test_a_power_of_less_than_1_is_no_softmax() -> None:
    """It would be a softmax of the negated scores, which no attention uses."""
    for _, _, outcomes in compiled(powers(lambda s: 0.5**s, over_sum), mla.tensors()):
        assert outcomes == []


def of_two(change: Function, *, joined: bool) -> Function:
    """Absorbed by hand: keys are `change(latent)`, values are the latent."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        q_nope, q_rope = mla.queries(x, w_q).split([P, R], -1)
        w_uk, w_uv = mla.weights(w_kv)
        k, q = change(latent), q_nope @ w_uk
        if joined:
            scores = torch.cat([q, q_rope], -1) @ torch.cat([k, k_rope], -1)[:, None].mT
        else:
            scores = q @ k[:, None].mT + q_rope @ k_rope[:, None].mT
        return (scores * SCALE).softmax(-1) @ latent[:, None] @ w_uv.mT

    return attention


UNCHANGED: dict[str, Function] = {
    f"{name}{', of one product' * joined}": of_two(change, joined=joined)
    for joined in (False, True)
    for name, change in {
        "keys of the token before": lambda c: c.roll(1, 1),
        "keys with a nonlinearity": torch.tanh,
        "keys that are rounded where values are not": lambda c: c.bfloat16().double(),
        "keys with a factor a token": lambda c: c * torch.arange(T)[:, None].double(),
        "keys of the columns in another order": lambda c: c.flip(-1),
    }.items()
}


@pytest.mark.parametrize("function", UNCHANGED.values(), ids=UNCHANGED)
def test_another_tensor_is_no_latent(function: Function) -> None:
    for _, _, (outcome,) in compiled(function, mla.tensors()):
        assert outcome.path == "unchanged"


FUNCTIONS: dict[str, Function] = {
    "-1e4, then a bias": scored(lambda s: filled(-1e4, blind=True)(s) + torch.arange(T).double()),
    "a bias, then -1e4": scored(lambda s: filled(-1e4)(s + filled(-1e4, blind=True)(torch.zeros(SQ, T).double()))),
    "-1e4 and -2e4": scored(lambda s: filled(-2e4, shift=-1)(filled(-1e4, blind=True)(s))),
    "a scale a key": scored(lambda s: s * torch.arange(T).double()),
    "a scale a head and key": scored(lambda s: s * heads() * torch.arange(T).double()),
    "a scale that is made of the score": scored(lambda s: s * s.sigmoid()),
    "a scale a head after a mask": scored(lambda s: filled(-1e4, blind=True)(s) * heads()),
    "a divisor that is made of the score": scored(lambda s: s / (s * heads())),
    "-100": scored(filled(-100.0)),
    "-1e4 of which a scale leaves little": scored(lambda s: filled(-1e4, blind=True)(s * 50) / 50),
}
"""More than a sum of products and masks: under these, chunks of keys cannot be merged by log-sum-exp."""


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_of_the_scores_takes_no_chunks_and_is_right(function: Function) -> None:
    captured = capture(function, *mla.tensors())
    before = run(captured, *mla.tensors())
    for path in ("absorbed", "chunked"):
        module = fx.GraphModule(captured, copy.deepcopy(captured.graph))
        (outcome,) = rewrite(module, path)
        assert outcome.path == path
        assert "expanded_attention" not in module.code
        check_right(before, run(module, *mla.tensors()))


@pytest.mark.parametrize("change", [put(-3.0), put(3.0), put(-torch.inf, accumulate=True)])
def test_scores_that_are_assigned_what_hides_nothing_are_no_mask(change: Function) -> None:
    for _, _, (outcome,) in compiled(scored(change), mla.tensors()):
        assert outcome.path == "unchanged"


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.masked_fill(s == s.amax(), torch.inf),
        lambda s: s.masked_fill(s != -torch.inf, 0.0),
        lambda s: s.masked_fill(s == -torch.inf, 0.0) + 1,
        lambda s: s.masked_fill(s.roll(1, -2) == -torch.inf, 0.0),
    ],
)
def test_other_numbers_in_the_place_of_a_log_sum_exp_are_no_softmax(change: Function) -> None:
    for _, _, outcomes in compiled(by_log_sum_exp(change), mla.tensors()):
        assert not any(outcome.rewritten for outcome in outcomes)
