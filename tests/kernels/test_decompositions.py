"""The decompositions of the mla ops into ATen operations, each against float64, as its op is tested."""

import pytest
import torch

from mla_compile.kernels import decompositions
from mla_compile.kernels.expanded_attention import decomposition as expanded
from mla_compile.kernels.expanded_attention import expanded_attention_reference
from mla_compile.kernels.latent_attention import latent_attention_reference
from mla_compile.kernels.merge_states import merge_states_reference
from mla_compile.kernels.paged_expanded_attention import paged_expanded_attention_reference
from mla_compile.kernels.paged_latent_attention import paged_latent_attention_reference
from mla_compile.kernels.per_head_matmul import per_head_matmul_reference
from mla_compile.kernels.sparse_latent_attention import sparse_latent_attention_reference

from .errors import assert_as_close_as
from .naive import MASKS, case_of, make_inputs, naive_mla
from .paged import CODED, make_paged, make_paged_heads, quantised

mla = torch.ops.mla
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def decomposed(op, *arguments, **more):
    return decompositions.decompositions()[op.default](*arguments, **more)


def double(*arguments):
    return tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments)


def assert_right(result, reference, arguments):
    """Each output against the reference in float64; its error in the dtype of the inputs is the measure."""
    o, lse = result
    exact, measure = reference(*double(*arguments)), reference(*arguments)
    assert_as_close_as(measure[0].to(o.dtype), o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])
    assert o.is_contiguous()
    assert lse.is_contiguous()


def test_every_op_has_one():
    own = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("mla::")}
    general = {name for name in own if name.endswith("_general")}  # called by the dispatcher alone, never in a graph
    without = {"sealed_attention", "append_latents", "expanded_attention_backward", "latent_attention_backward"}
    assert {op._schema.name.split("::")[1] for op in decompositions.decompositions()} == own - without - general


@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent_attention(dtype, mask):
    sizes = (2, 5, 60, 4, 64, 16, 8, 16)
    x = make_inputs(sizes, dtype)
    arguments = *x.absorbed, *case_of(sizes, mask, dtype), x.scale
    assert_right(decomposed(mla.latent_attention, *arguments), latent_attention_reference, arguments)


@pytest.mark.diagonal
@pytest.mark.parametrize("attend", ["_flash", "_composed"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("workspace_tokens", [7, 60, 100])
def test_expanded_attention(dtype, mask, workspace_tokens, attend, monkeypatch):
    monkeypatch.setattr(expanded, "_flash", getattr(expanded, attend))
    sizes = (2, 5, 60, 4, 24, 16, 8, 12)
    case = case_of(sizes, mask, dtype)
    shared = make_inputs(sizes, dtype)
    for x in (shared, shared.with_own_ropes(), shared.with_two_latents(10)):
        o, lse = decomposed(mla.expanded_attention, *x.tensors, *case, x.scale, workspace_tokens)
        exact, exact_lse = expanded_attention_reference(*double(*x.tensors), *case, x.scale, workspace_tokens)
        eager, eager_lse = naive_mla(x, case)
        merges = -(-60 // workspace_tokens)
        assert_as_close_as(eager, o, exact, merges)
        assert_as_close_as(eager_lse.float(), lse, exact_lse, merges)


@pytest.mark.parametrize("causal_offset", [-6, -5, -4, -1, 0, 7, 50])
def test_expanded_attention_stops_at_the_causal_limit(causal_offset):
    x = make_inputs((1, 5, 12, 2, 11, 7, 5, 9))
    x.latent[:, max(5 + causal_offset, 0) :] = torch.nan  # seen by no query, and in no chunk, since a chunk is one key
    tensors = x.q, x.latent, x.k_rope, x.w_uk, x.w_uv
    o, lse = decomposed(mla.expanded_attention, *tensors, None, causal_offset, x.scale, 1)
    x.latent.nan_to_num_(0.0)
    exact, exact_lse = expanded_attention_reference(*double(*tensors), None, causal_offset, x.scale, 1)
    eager, eager_lse = naive_mla(x, (None, causal_offset))
    assert_as_close_as(eager, o, exact, 12)
    assert_as_close_as(eager_lse, lse, exact_lse, 12)


@pytest.mark.diagonal
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sparse_latent_attention(dtype, mask, uniform):
    sizes = (2, 5, 60, 3, 33, 5, 7, 9)
    x = make_inputs(sizes, dtype)
    indices = torch.rand(2, 5, 60).topk(9).indices
    indices[0, 0], indices[1, 2, 3] = -1, 60  # a query that names nothing, an index that is no key
    arguments = *x.absorbed, indices, *case_of(sizes, mask, dtype), x.scale, uniform
    assert_right(decomposed(mla.sparse_latent_attention, *arguments), sparse_latent_attention_reference, arguments)


@pytest.mark.parametrize("mask", [None, "bool", "bias", "of one key for all"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paged_latent_attention(dtype, causal, mask):
    x = make_paged([70, 0, 64, 3], (3, 4, 24, 8), 16, dtype)
    tensor = {
        None: None,
        "bool": torch.rand(4, 1, 3, 70) < 0.7,
        "bias": torch.randn(1, 4, 3, 70, dtype=dtype),
        "of one key for all": torch.rand(4, 1, 3, 1) < 0.7,
    }[mask]
    o, lse = decomposed(mla.paged_latent_attention, *x.arguments, causal, x.scale, mask=tensor)
    exact = paged_latent_attention_reference(*x.double().arguments, causal, x.scale, mask=double(tensor)[0])
    measure = paged_latent_attention_reference(*x.arguments, causal, x.scale, mask=tensor)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1].float(), lse, exact[1])


@pytest.mark.parametrize(("groups", "rope_too", "coded"), CODED)
def test_pages_in_few_bits(groups, rope_too, coded):
    x = make_paged([70, 0, 64, 3], (3, 4, 24, 8), 16)
    arguments, scales = quantised(x, groups, rope_too, coded)
    first = x.seq_lens - 1
    o, lse = decomposed(mla.paged_latent_attention, *arguments, True, x.scale, scales, first_positions=first)
    more = {"latent_scales": scales, "first_positions": first}
    exact = paged_latent_attention_reference(*double(*arguments[:2]), *arguments[2:], True, x.scale, **more)
    measure = paged_latent_attention_reference(*arguments, True, x.scale, **more)
    assert_as_close_as(measure[0], o, exact[0])
    assert_as_close_as(measure[1], lse, exact[1])


PREFILLS = {
    "lengths": {},
    "new tokens": {"query_lens": torch.tensor([9, 0, 3, 5])},
    "positions": {"first_positions": torch.tensor([60, 9, -2, 1]), "query_lens": torch.tensor([9, 9, 9, 2])},
    "bool": {"mask": torch.rand(4, 1, 9, 71) < 0.7},
    "bias": {"mask": torch.randn(1, 4, 9, 71)},
    "finfo.min": {"mask": torch.full((4, 1, 1, 71), torch.finfo(torch.float32).min)},
    "of one key for all": {"mask": torch.rand(4, 1, 9, 1) < 0.7},
}


@pytest.mark.diagonal
@pytest.mark.parametrize("attend", ["_flash", "_composed"])
@pytest.mark.parametrize("more", PREFILLS.values(), ids=PREFILLS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_paged_expanded_attention(dtype, causal, more, attend, monkeypatch):
    monkeypatch.setattr(expanded, "_flash", getattr(expanded, attend))
    x = make_paged_heads([70, 0, 64, 3], (9, 4, 24, 16, 8, 12), 16, dtype)
    lowest = torch.finfo(dtype).min
    more = {name: t.clamp(min=lowest).to(dtype) if t.is_floating_point() else t for name, t in more.items()}
    assert_prefill(x, causal, 20, more)


@pytest.mark.parametrize(("groups", "rope_too", "coded"), CODED)
def test_chunks_of_pages_in_few_bits(groups, rope_too, coded):
    x = make_paged_heads([70, 0, 64, 3], (9, 4, 24, 16, 8, 12), 16, groups=groups, rope_too=rope_too, coded=coded)
    assert_prefill(x, True, 20, {"latent_scales": x.scales})


def assert_prefill(x, causal, workspace_tokens, more):
    op = mla.paged_expanded_attention
    rest = causal, x.scale, workspace_tokens
    o, lse = decomposed(op, *x.arguments, *rest, **more)
    doubled = {name: t.double() if name == "mask" and t.is_floating_point() else t for name, t in more.items()}
    exact = paged_expanded_attention_reference(*x.double().arguments, *rest, **doubled)
    measure = paged_expanded_attention_reference(*x.arguments, *rest, **more)
    assert_as_close_as(measure[0], o, exact[0], 4)
    assert_as_close_as(measure[1].float(), lse, exact[1], 4)
    assert o.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_states(dtype):
    (o_a, o_b), (lse_a, lse_b) = torch.randn(2, 2, 3, 5, 8, dtype=dtype), torch.randn(2, 2, 3, 5)
    lse_a[0, 0], lse_b[0, 0], lse_b[1, 1] = -torch.inf, -torch.inf, -torch.inf
    arguments = o_a, lse_a, o_b, lse_b
    assert_right(decomposed(mla.merge_states, *arguments), merge_states_reference, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_per_head_matmul(dtype):
    x, weight = torch.randn(2, 3, 4, 16, dtype=dtype), torch.randn(4, 8, 16, dtype=dtype).transpose(1, 2)
    out = decomposed(mla.per_head_matmul, x, weight)
    assert_as_close_as(per_head_matmul_reference(x, weight), out, per_head_matmul_reference(*double(x, weight)))
    assert out.is_contiguous()
