"""The proof that an attention is MLA finds its latent, weights and rope pieces, and the axes of each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_compile.passes.algebra.sizes import product
from mla_compile.passes.algebra.terms import Dim
from mla_compile.passes.attention.attention import Attention
from mla_compile.passes.attention.find import find
from mla_compile.passes.mla.prove import prove
from mla_compile.passes.mla.site import Site
from mla_compile.passes.nodes.refusal import Refusal
from mla_compile.passes.trace.trace import Trace
from tests.passes import spellings as mla
from tests.passes.graphs import capture
from tests.passes.spellings import SCALE, SPELLINGS, SQ, UNKNOWN, B, Function, L, N, P, R, T, V


def site(function: Function, *inputs: Tensor, symbolic: bool = False) -> Site:
    graph = capture(function, *(inputs or mla.tensors()), symbolic=UNKNOWN if symbolic else ()).graph
    trace = Trace(graph)
    (attention,) = find(graph, trace)
    assert isinstance(attention, Attention)
    return prove(attention, trace)


def size(dim: Dim) -> object:
    return product(axis.size for axis in dim)


GROUPED = ("expanded groups", "groups with rope queries behind", "grouped sdpa")
WITHOUT_ROPE = ("without rope", "keys of all heads first")


@pytest.mark.parametrize("name", [name for name in SPELLINGS if name not in (*GROUPED, *WITHOUT_ROPE)])
def test_the_sizes_of_a_site_are_those_of_the_model(name: str) -> None:
    assert site(SPELLINGS[name]).sizes == {"B": B, "Sq": SQ, "T": T, "N": N, "L": L, "P": P, "R": R, "V": V}


def test_a_site_without_rope_has_none() -> None:
    proved = site(mla.without_rope)
    assert proved.ropes == ()
    assert proved.sizes["R"] == 0


def test_heads_that_share_keys_are_heads() -> None:
    assert site(mla.grouped_sdpa).sizes["N"] == 2 * N


def test_symbolic_sizes_are_the_symbols_of_the_inputs() -> None:
    sizes = site(mla.combined, symbolic=True).sizes
    assert all(sizes[name].is_Symbol for name in ("B", "Sq", "T"))
    assert [sizes[name] for name in ("N", "L", "P", "R", "V")] == [N, L, P, R, V]


@pytest.mark.parametrize("name", SPELLINGS)
def test_latent_and_weights_run_over_their_axes_only(name: str) -> None:
    proved = site(SPELLINGS[name])
    assert proved.w_uk is not None
    assert proved.w_uv is not None
    keys = {*proved.attention.keys}
    assert proved.latent.read.axes <= {*proved.batch, *keys, *proved.rank}
    assert proved.w_uk.axes <= {*proved.heads, *proved.nope.summed, *proved.rank}
    assert proved.w_uv.axes <= {*proved.heads, *proved.attention.columns, *proved.rank}
    for rope in proved.ropes:
        assert rope.key.axes <= {*proved.batch, *keys, *rope.summed}


def test_what_a_site_reads_is_what_the_user_gave() -> None:
    proved = site(mla.combined)
    names = [read.source.name for read in (proved.latent.read, proved.w_uk, proved.w_uv, proved.ropes[0].key.read)]
    assert names == ["arg1_1", "arg4_1", "arg4_1", "arg2_1"]


def test_scales_go_to_the_piece_that_they_scale() -> None:
    proved = site(mla.scale_on_nope_only)
    assert proved.nope.scale == pytest.approx(0.7 * SCALE)
    assert [rope.scale for rope in proved.ropes] == [pytest.approx(SCALE)]
    proved = site(mla.two_scores_einsum)
    assert proved.nope.scale == pytest.approx(0.5)
    assert [rope.scale for rope in proved.ropes] == [pytest.approx(0.3)]


def test_rope_on_both_sides_is_two_pieces() -> None:
    assert [rope.width for rope in site(mla.rope_on_both_sides).ropes] == [R // 2, R // 2]


def test_attention_absorbed_by_hand_has_no_weights_left() -> None:
    proved = site(mla.absorbed_by_hand)
    assert proved.w_uk is None
    assert proved.w_uv is None
    assert size(proved.rank) == L


def refused(function: Function, *inputs: Tensor) -> str:
    with pytest.raises(Refusal) as caught:
        site(function, *inputs)
    return str(caught.value)


def test_latents_of_two_widths_are_two_latents() -> None:
    """Their first columns are the same memory, but that does not make them one latent."""

    def attention(q: Tensor, cache: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        return (q @ (cache @ w_uk).mT).softmax(-1) @ (cache[..., :4] @ w_uv)

    inputs = torch.zeros(SQ, P), torch.zeros(T, L), torch.zeros(L, P), torch.zeros(4, V)
    assert "keys and values from one latent" in refused(attention, *inputs)


def test_values_that_are_some_columns_of_the_keys_are_not_the_keys() -> None:
    """Absorbed by hand over a cache that holds latent and rope key in one tensor."""

    def attention(q: Tensor, cache: Tensor) -> Tensor:
        return (q @ cache.mT).softmax(-1) @ cache[..., :L]

    proved = site(attention, torch.zeros(B, SQ, L + R), torch.zeros(B, T, L + R))
    assert (size(proved.rank), [size(rope.summed) for rope in proved.ropes]) == (L, [R])


def test_latents_of_two_places_of_one_tensor_are_two_latents() -> None:
    def attention(q: Tensor, both: Tensor, w: Tensor) -> Tensor:
        return (q @ (both[:, :L] @ w).mT).softmax(-1) @ (both[:, L:] @ w)

    inputs = torch.zeros(SQ, P), torch.zeros(T, 2 * L), torch.zeros(L, P)
    assert "keys and values from one latent" in refused(attention, *inputs)


def test_every_other_token_of_the_values_is_not_every_token_of_the_keys() -> None:
    def attention(q: Tensor, latent: Tensor, w: Tensor) -> Tensor:
        return (q @ (latent[:T] @ w).mT).softmax(-1) @ (latent[::2] @ w)

    inputs = torch.zeros(SQ, P), torch.zeros(2 * T, L), torch.zeros(L, P)
    assert "keys and values from one latent" in refused(attention, *inputs)


def test_columns_of_the_latent_in_another_order_are_another_latent() -> None:
    def attention(q: Tensor, latent: Tensor, w: Tensor) -> Tensor:
        other = latent.view(T, 2, 3).transpose(1, 2).reshape(T, 6)
        return (q @ (latent @ w).mT).softmax(-1) @ (other @ w)

    inputs = torch.zeros(SQ, P), torch.zeros(T, 6), torch.zeros(6, P)
    assert "expected keys" in refused(attention, *inputs)


def test_tokens_in_another_order_are_another_latent() -> None:
    def attention(q: Tensor, latent: Tensor, w: Tensor) -> Tensor:
        other = latent.view(2, 3, L).transpose(0, 1).reshape(6, L)
        return (q @ (latent @ w).mT).softmax(-1) @ (other @ w)

    inputs = torch.zeros(SQ, P), torch.zeros(6, L), torch.zeros(L, P)
    assert "expected keys" in refused(attention, *inputs)


def test_a_reason_names_the_node_that_it_found() -> None:
    text = refused(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *(torch.zeros(B, 4, 4) for _ in range(3)))
    assert text.startswith("expected values that are an up-projection of a latent, found `v_1` (placeholder)")
