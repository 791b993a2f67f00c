"""MLA is rewritten, however it is written, and stays right."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx

from tests.errors import assert_as_close_as_eager
from tests.passes import spellings as mla
from tests.passes.checks import check_rewritten, check_right, compiled, unfolded
from tests.passes.graphs import capture, rewrite, run
from tests.passes.spellings import HIDDEN, SCALE, SPELLINGS, SQ, UNKNOWN, B, Function, L, N, P, R, T, V


@pytest.mark.parametrize("function", SPELLINGS.values(), ids=SPELLINGS)
def test_mla_is_rewritten_in_any_spelling(function: Function) -> None:
    check_rewritten(function, mla.tensors())


@pytest.mark.parametrize(
    "function",
    [
        mla.combined,
        mla.transposed_output,
        mla.with_buffers,
        mla.separate_einsum,
        mla.two_scores_einsum,
        mla.rope_first,
        mla.latent_from_one_projection,
        mla.keys_of_all_heads_first,
        mla.merged_batch,
        mla.grouped_sdpa,
    ],
)
def test_mla_is_rewritten_for_sizes_that_are_not_known(function: Function) -> None:
    """One spelling of each layout. The rewritten graph is right for other sizes than those it was traced with, too."""
    x, latent, k_rope, *weights = mla.tensors(batch=3, queries=4)
    others = x, latent[:, :7], k_rope[:, :7], *weights
    for path, module, outcomes in compiled(function, mla.tensors(), UNKNOWN):
        assert [(o.path, o.reason) for o in outcomes] == [(path, "asked for by mla.path")]
        assert not unfolded(module)
        check_right(run(capture(function, *others), *others), run(module, *others))


@pytest.mark.parametrize("function", [mla.combined, mla.combined_sdpa])
def test_a_rewritten_graph_has_nothing_left_to_rewrite(function: Function) -> None:
    for path, module, _ in compiled(function, mla.tensors()):
        code = module.code
        assert rewrite(module, path) == []
        assert module.code == code


@pytest.mark.parametrize(("batch", "queries"), [(1, SQ), (B, 1), (1, 1)])
@pytest.mark.parametrize(
    "function",
    [mla.combined, mla.combined_sdpa, mla.with_buffers, mla.separate_einsum, mla.two_scores, mla.merged_batch],
)
def test_one_sequence_and_one_query(function: Function, batch: int, queries: int) -> None:
    check_rewritten(function, mla.tensors(batch, queries))


@pytest.mark.parametrize("symbolic", [(), [(), (1,), (1,)], UNKNOWN], ids=["known", "keys", "all"])
@pytest.mark.parametrize("function", [mla.grown_cache, mla.buffer_cache])
def test_a_cache_of_plain_torch(function: Function, symbolic: Sequence[Sequence[int]]) -> None:
    check_rewritten(function, mla.tensors(), symbolic)


def test_attention_absorbed_by_hand_meets_the_op_too() -> None:
    for _, module, (outcome,) in compiled(mla.absorbed_by_hand, mla.tensors()):
        assert (outcome.path, outcome.reason) == ("absorbed", "attends to the latent already: absorbed by hand")
        assert not unfolded(module)


@pytest.mark.parametrize("path", ["absorbed", "chunked"])
def test_bfloat16_with_a_float32_softmax(path: str) -> None:
    """The error is at most twice that of the graph before the passes."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return ((q @ k.transpose(-1, -2)) * SCALE).softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    tensors = mla.tensors()
    halves = [t.bfloat16() for t in tensors]
    module = capture(attention, *halves)
    exact = run(capture(attention, *(t.double() for t in halves)), *(t.double() for t in halves))
    before = (run(module, *halves).double() - exact).abs().max()
    (outcome,) = rewrite(module, path)
    assert outcome.path == path
    assert not unfolded(module)
    after = run(module, *halves)
    assert after.dtype == torch.bfloat16
    # Before, keys, scores and weights are rounded; after, the absorbed query and the latent output: no more roundings.
    assert (after.double() - exact).abs().max() <= 2 * before


def _weights_wide(q: Tensor, k: Tensor, v: Tensor, wide: torch.dtype) -> Tensor:
    return (q @ k.mT * SCALE).tanh().softmax(-1, dtype=wide) @ v.to(wide)


def _scores_wide(q: Tensor, k: Tensor, v: Tensor, wide: torch.dtype) -> Tensor:
    return (q.to(wide) @ k.to(wide).mT * SCALE).tanh().softmax(-1).to(v.dtype) @ v


@pytest.mark.parametrize("rows", [(1, 1), (mla.B, SQ)], ids=["a row", "rows"])
@pytest.mark.parametrize("attend", [_weights_wide, _scores_wide])
def test_bfloat16_with_products_in_float32_around_a_function_of_the_scores(
    attend: Function, rows: tuple[int, int]
) -> None:
    """The error is at most twice that of the graph before the passes."""
    halves = [t.bfloat16() for t in mla.tensors(*rows)]
    module = capture(lambda *args: attend(*mla.naive(*args), torch.float32), *halves)
    exact = attend(*mla.naive(*(t.double() for t in halves)), torch.float64)
    before = run(module, *halves)
    (outcome,) = rewrite(module)
    assert outcome.path == "absorbed"
    after = run(module, *halves)
    assert after.dtype == before.dtype
    assert (after.double() - exact).abs().max() <= 2 * (before.double() - exact).abs().max()


def test_two_layers_and_the_second_reads_what_the_first_became() -> None:
    def layers(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        first = mla.combined_sdpa(x, latent, k_rope, w_q, w_kv).transpose(1, 2).flatten(2)
        second = torch.cat([latent[:, SQ:], first[..., :L]], 1)
        return mla.combined(first[..., :HIDDEN], second, k_rope, w_q, w_kv)

    for path, module, outcomes in compiled(layers, mla.tensors()):
        assert [o.path for o in outcomes] == [path, path]
        assert not unfolded(module)


def test_one_layer_of_mla_and_one_that_is_not() -> None:
    def layers(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return mla.sealed(q, k, v) + mla.sealed(q, k.tanh(), v)

    for path, _, (first, second) in compiled(layers, mla.tensors()):
        assert (first.path, second.path) == (path, "unchanged")


def test_keys_that_are_returned_as_well_are_computed_beside_the_rewritten_attention() -> None:
    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return torch.cat([mla.softmax(q, k, v).flatten(), k.flatten()])

    for path, _, (outcome,) in compiled(attention, mla.tensors()):
        assert outcome.path == path, outcome.reason


def test_ordinary_attention_without_rope_is_mla_whose_latent_is_the_hidden_state() -> None:
    """The rewrite is right here, if rarely faster: whether it pays is for the cost model, not for the proof, to say."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        w_k, w_v = (w.reshape(-1, L).t().contiguous() for w in mla.weights(w_kv))
        k, v = ((latent @ w).view(B, T, N, -1).transpose(1, 2) for w in (w_k, w_v))
        return mla.sealed(mla.queries(x, w_q)[..., :P], k, v)

    check_rewritten(attention, mla.tensors())


def test_self_attention_whose_query_is_the_latent_itself() -> None:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        w_k, w_v = w_kv[:, :L], w_kv[:, L : 2 * L]
        return ((latent @ (latent @ w_k).mT) * SCALE).softmax(-1) @ (latent @ w_v)

    for path, _, (outcome,) in compiled(attention, mla.tensors()):
        assert outcome.path == path, outcome.reason


OPAQUE: dict[str, Function] = {
    "a soft cap": lambda s: 30 * torch.tanh(s / 30),
    "a soft cap and a mask": lambda s: (30 * torch.tanh(s / 30)).masked_fill(torch.ones(SQ, T).tril(3) == 0, -1e30),
    "scores times a mask of their own": lambda s: s * (s > 0),
    "scores and their square": lambda s: s + 0.1 * s * s,
}


@pytest.mark.parametrize("change", OPAQUE.values(), ids=OPAQUE)
@pytest.mark.parametrize("bias", [False, True])
def test_whatever_happens_to_scores_happens_to_absorbed_ones(change: Function, bias: bool) -> None:
    """No kernel computes these functions, but both products are still absorbed. `test_by_heads` has many queries."""

    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        k, v = (k + args[3][0, : P + R], v + args[3][1, :V]) if bias else (k, v)
        return mla.softmax(q, k, v, change)

    tensors = mla.tensors()
    module = capture(attention, *tensors)
    before = run(module, *tensors)
    (outcome,) = rewrite(module, "absorbed")
    assert outcome.path == "absorbed"
    assert "sum of products" not in outcome.reason
    check_right(before, run(module, *tensors))
    assert not [node for node in unfolded(module) if node.meta["val"].shape[-1] in (P, V, P + R)]


@pytest.mark.parametrize("where", ["after the view", "addmm"])
@pytest.mark.parametrize("symbolic", [(), UNKNOWN], ids=["known", "unknown"])
def test_an_up_projection_with_a_bias(where: str, symbolic: Sequence[Sequence[int]]) -> None:
    """The keys' bias adds one number to each row of scores, the values' one vector to each row of the output."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        bias = w_q.flatten()[: N * (P + V)]
        if where == "addmm":
            kv = torch.nn.functional.linear(latent, w_kv.t(), bias).unflatten(-1, (N, P + V)).transpose(1, 2)
        else:
            kv = (latent @ w_kv).unflatten(-1, (N, P + V)).transpose(1, 2) + bias.view(N, 1, P + V)
        k_nope, v = kv.split([P, V], -1)
        return mla.sealed(mla.queries(x, w_q), torch.cat([k_nope, mla.to_heads(k_rope)], -1), v)

    check_rewritten(attention, mla.tensors(), symbolic)


def test_a_bias_of_values_in_a_row_that_is_masked_everywhere() -> None:
    """SDPA gives 0 in such a row: the bias is not added."""
    seen = torch.ones(SQ, T, dtype=torch.bool)
    seen[1] = False

    def attention(seen: Tensor, x: Tensor, *args: Tensor) -> Tensor:
        q, k, v = mla.naive(x, *args)
        return mla.sealed(q, k, v + args[2].flatten()[:V], seen)

    for path, _, (outcome,) in compiled(attention, (seen, *mla.tensors())):
        assert outcome.path == path, outcome.reason


def test_a_bias_of_keys_beside_a_sink() -> None:
    """The keys' bias shifts all scores of a row alike, which a softmax cancels, but the sink does not have it."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        q, k, v = mla.naive(x, latent, k_rope, w_q, w_kv)
        scores = (q @ (k + w_q[0, : P + R]).transpose(-1, -2)) * SCALE
        sink = w_q[0, :N].view(1, N, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ (v + w_q[1, :V])

    check_as_close_as_eager(attention, [t.float() for t in mla.tensors()])


def test_a_latent_that_is_computed_twice() -> None:
    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        q, k, _ = mla.naive(x, latent.sigmoid(), k_rope, w_q, w_kv)
        return mla.softmax(q, k, mla.up_projected(latent.sigmoid(), w_kv)[1])

    check_rewritten(attention, mla.tensors())


def test_columns_of_two_dtypes() -> None:
    """`torch.cat` casts to the wider dtype: rope keys of float32 tables beside an up-projection in bfloat16."""

    def attention(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        nope, rope = mla.queries(x, w_q).split([P, R], -1)
        k_nope, v = mla.up_projected(latent, w_kv)
        wide = torch.promote_types(x.dtype, torch.float32)
        k = torch.cat([k_nope, mla.to_heads(k_rope.to(wide).cos())], -1).to(x.dtype)
        return mla.softmax(torch.cat([nope, rope.to(wide).cos()], -1).to(x.dtype), k, v)

    check_as_close_as_eager(attention, [t.bfloat16() for t in mla.tensors()])


def check_as_close_as_eager(function: Function, tensors: Sequence[Tensor]) -> None:
    """Assert that each path is taken, and that the result is as close to float64 as eager's."""
    captured = capture(function, *tensors)
    eager = run(captured, *tensors)
    exact = function(*(t.double() for t in tensors))
    for path in ("absorbed", "chunked"):
        module = fx.GraphModule(captured, copy.deepcopy(captured.graph))
        (outcome,) = rewrite(module, path)
        assert outcome.path == path, outcome.reason
        assert_as_close_as_eager(run(module, *tensors), eager, exact)
