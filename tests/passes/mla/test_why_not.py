"""The reason of an unchanged attention names the op or the sizes at which the trace stopped, and the line of source."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_compile
from tests.passes import spellings as mla
from tests.passes.graphs import capture, rewrite
from tests.passes.spellings import SQ, B, Function, N, P, R, T, V

NO_VALUES = "expected values that are an up-projection of a latent, found "
NO_KEYS = "expected keys of which some columns are an up-projection of `arg1_1` (placeholder), found "
STORED = "expected a cache of latents, found keys and values that are stored expanded: "


def values(change: Function) -> Function:
    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return mla.sealed(q, k, change(v))

    return attention


def keys(change: Function) -> Function:
    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        return mla.sealed(q, change(k), v)

    return attention


def written_at_places_of_a_run(v: Tensor) -> Tensor:
    """The buffer is of this step alone, not a cache; its places are known only at run time."""
    return torch.zeros_like(v).index_copy(2, torch.randperm(T), v)


def written_to_a_cache(*args: Tensor) -> Tensor:
    q, k, v = mla.naive(*args[:5])
    places = torch.arange(T)[torch.arange(T) >= 0]
    return mla.sealed(q, args[5].index_copy(2, places, k), args[6].index_copy(2, places, v))


def written_to_a_cache_for_more_sequences(*args: Tensor) -> Tensor:
    """Keys and values of an up-projection with a bias are written as `cache[:batch, :, start:end] = new`."""
    x, latent, k_rope, w_q, w_kv, *caches = args
    expanded = (latent @ w_kv + w_kv[0]).view(B, T, N, P + V).transpose(1, 2)
    k_nope, v = expanded.split([P, V], dim=-1)
    k = torch.cat([k_nope, mla.to_heads(k_rope)], dim=-1)
    for cache, new in zip(caches, (k, v), strict=True):
        cache[:B, :, 1:] = new[:, :, 1:]
    return mla.sealed(mla.queries(x, w_q), caches[0][:B], caches[1][:B])


def cut_at_other_borders(v: Tensor) -> Tensor:
    """A row is added, and all rows are cut anew into rows of another width, which begin at other places."""
    joined = torch.cat([v, v.new_ones(*v.shape[:2], 1, V)], 2).reshape(B, N, V, T + 1)
    return joined[:, :, :-1].reshape(B, N, T + 1, V - 1)[:, :, :T]


def merged_in_two_orders(*args: Tensor) -> Tensor:
    q, k, v = mla.naive(*args)
    p = (q @ k.transpose(-1, -2)).softmax(-1).reshape(B * N, SQ, T)
    return p @ v.transpose(0, 1).reshape(N * B, T, V)


def reordered_beside_new(*args: Tensor) -> Tensor:
    """Of what is up-projected here, some is in another order: none of it is stored."""
    q, k, v = mla.naive(*args)
    order = torch.arange(T).flip(0)
    k, v = (torch.cat([each.index_select(0, order[-B:])[:, :, 1:], each[:, :, :1]], 2) for each in (k, v))
    return mla.sealed(q, k, v)


def scaled_in_part(*args: Tensor) -> Tensor:
    q, k, v = mla.naive(*args)
    k, v = (torch.cat([each[:, :, :2] * 2, each[:, :, 5:]], 2) for each in (k, v))
    return mla.sealed(q, k, v)


def test_pieces_of_up_projections_are_to_be_joined_before() -> None:
    (outcome,) = rewrite(capture(scaled_in_part, *mla.tensors()))
    assert outcome.reason.startswith(NO_VALUES + "2 pieces: a product of")
    assert outcome.remedy.startswith("join the latents")


def cut_together(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
    """Keys of all heads are joined with a rope key of each head for itself, and one view makes heads of them."""
    q, k, v = mla.naive(x, latent, k_rope, w_q, w_kv)
    nope, rope = (part.transpose(1, 2).flatten(2) for part in k.split([P, R], -1))
    k = torch.cat([nope, rope * torch.arange(N * R)], -1)
    return mla.sealed(q, k.unflatten(2, (N, P + R)).transpose(1, 2), v)


def test_pieces_that_one_view_cuts_into_heads_are_to_be_cut_before_they_are_joined() -> None:
    (outcome,) = rewrite(capture(cut_together, *mla.tensors()))
    assert "where the trace stopped in `view_" in outcome.reason
    assert outcome.remedy.startswith("cut every piece into heads before they are joined")


def test_a_function_of_what_is_cut_into_heads_is_what_stands_between() -> None:
    (outcome,) = rewrite(capture(keys(torch.tanh), *mla.tensors()))
    assert outcome.remedy.startswith("let nothing but views, casts, joins and sums lie between")


@torch.library.custom_op("mla_tests::product_in_few_bits", mutates_args=())
def product_in_few_bits(latent: Tensor, w_kv: Tensor) -> Tensor:
    return latent @ w_kv


@product_in_few_bits.register_fake
def _(latent: Tensor, w_kv: Tensor) -> Tensor:
    return latent.new_empty(*latent.shape[:-1], w_kv.shape[-1])


def test_a_product_in_an_op_of_a_library_may_be_left_out_of_the_quantisation() -> None:
    def function(x: Tensor, latent: Tensor, k_rope: Tensor, w_q: Tensor, w_kv: Tensor) -> Tensor:
        kv = product_in_few_bits(latent, w_kv).unflatten(-1, (N, P + V)).transpose(1, 2)
        k = torch.cat([kv[..., :P], mla.to_heads(k_rope)], -1)
        return mla.softmax(mla.queries(x, w_q), k, kv[..., P:])

    (outcome,) = rewrite(capture(function, *mla.tensors()))
    assert "`product_in_few_bits` (product_in_few_bits.default), where the trace stopped" in outcome.reason
    assert outcome.remedy.startswith("give the op a decomposition")
    assert "leave this projection out of the quantisation" in outcome.remedy


SENTENCES: dict[str, tuple[Function, str]] = {
    "an op that the passes do not know": (
        values(lambda v: v.cumsum(2)),
        NO_VALUES + "`cumsum` (cumsum.default), where the trace stopped: an op that the passes do not know",
    ),
    "an op of which no form can say what it does": (
        values(lambda v: v.new_zeros(B, N, T, V).diagonal_scatter(v.diagonal(0, 2, 3), 0, 2, 3)),
        NO_VALUES + "`diagonal_scatter` (diagonal_scatter.default), where the trace stopped: an axis that runs along "
        "two dimensions at once",
    ),
    "rows of a buffer that are not known": (
        values(written_at_places_of_a_run),
        NO_VALUES
        + ("`index_copy` (index_copy.default), where the trace stopped: positions that are known only at run time"),
    ),
    "a result of an op that the passes do not know": (
        keys(lambda k: k.sort(-1).values),
        NO_KEYS + "`getitem_2` (getitem), where the trace stopped: a result of `sort` (sort.default)",
    ),
    "a function of each element": (values(torch.tanh), NO_VALUES + "`tanh` (tanh.default)"),
    "a cache that holds keys and values": (
        written_to_a_cache,
        STORED + "`arg6_1` (placeholder) beside what is newly up-projected from `arg1_1` (placeholder)",
    ),
    "a cache for more sequences, of what a bias is added to": (
        written_to_a_cache_for_more_sequences,
        STORED + "`arg6_1` (placeholder) beside what is newly up-projected from `arg1_1` (placeholder)",
    ),
    "sequences in another order": (
        reordered_beside_new,
        NO_VALUES
        + "2 pieces: `index_select_1` (index_select.default), a product of `arg1_1` (placeholder) and `arg4_1` "
        "(placeholder)",
    ),
    "rows that are cut at other borders": (
        values(cut_at_other_borders),
        NO_VALUES + "`view_5` (view.default), where the trace stopped: 5 and 12 do not provably divide one another",
    ),
    "dimensions merged in two orders": (
        merged_in_two_orders,
        "expected the product of attention weights and values to keep its axes, found them "
        "cut or merged, where the trace "
        "stopped: axes of 2 and 5 do not provably divide one another",
    ),
}


@pytest.mark.parametrize(("function", "sentence"), SENTENCES.values(), ids=SENTENCES)
def test_the_sentence_says_where_the_trace_stopped(function: Function, sentence: str) -> None:
    cached = function in (written_to_a_cache, written_to_a_cache_for_more_sequences)
    caches = torch.zeros(B + 1, N, T, P + R).double(), torch.zeros(B + 1, N, T, V).double()
    sequences = B if function is written_to_a_cache else B + 1
    tensors = (*mla.tensors(), *(cache[:sequences] for cache in caches))[: 7 if cached else 5]
    (outcome,) = rewrite(capture(function, *tensors))
    assert outcome.path == "unchanged"
    assert outcome.reason.rpartition(", at `")[0] == sentence


@pytest.mark.usefixtures("without_codegen")
def test_the_sentence_has_the_line_of_source() -> None:
    def attention(*args: Tensor) -> Tensor:
        q, k, v = mla.naive(*args)
        v = v.cumsum(-1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    torch.compile(attention, backend="mla", fullgraph=True)(*(t.float() for t in mla.tensors()))
    (site,) = mla_compile.last_report().sites
    line = attention.__code__.co_firstlineno + 2
    found = f"`cumsum` (cumsum.default, {__file__}:{line}), where the trace stopped: an op that the passes do not know"
    assert site.reason.startswith(NO_VALUES + found + ", at `")
