"""cuDNN's attention in a prefill: computed by a stand-in on CPU; torch's own, on meta tensors, gives shapes."""

import contextlib
import dataclasses
import logging

import pytest
import torch

pytest.importorskip("triton")

from mla_compile.kernels._common import machine, tuning
from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels.expanded_attention import expanded_attention_gpu, expanded_attention_reference, triton
from mla_compile.kernels.expanded_attention.arguments import ExpandedAttention
from mla_compile.kernels.expanded_attention.aten import attend as by_aten
from mla_compile.kernels.implementations import choose, cudnn, expansions
from mla_compile.kernels.implementations.table import EXPANDED

H100 = Machine("sm_90", 132)
L, P, R, V = 32, 128, 64, 128
OP = "_scaled_dot_product_cudnn_attention"


def problem(
    queries=9, tokens=9, heads=4, offset=0, workspace_tokens=64, batch=3, device="cpu", dtype=torch.bfloat16, **changes
):
    def normal(*shape, scale=1.0):
        return torch.empty(shape, dtype=dtype, device=device).normal_() * scale

    x = ExpandedAttention(
        normal(batch, queries, heads, P + R),
        normal(batch, tokens, L + R)[..., :L],
        normal(batch, tokens, L + R)[..., L:],
        *normal(heads, P + V, L, scale=L**-0.5).split([P, V], 1),
        mask=None,
        causal_offset=offset,
        scale=0.07,
        workspace_tokens=workspace_tokens,
    )
    return dataclasses.replace(x, **changes)


def attention(query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, *, scale):
    """A stand-in with the signature of torch's op, computed in float32."""
    assert (attn_bias, compute_log_sumexp, dropout_p, return_debug_mask) == (None, True, 0.0, False)
    for t in (query, key, value):
        assert t.data_ptr() % 16 == 0
        assert t.stride(3) == 1
        assert all(stride % 8 == 0 for stride in t.stride()[:3])
    scores = query.float() @ key.float().mT * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ value.float()).to(query.dtype), scores.logsumexp(-1), *[None] * 7


@pytest.fixture(autouse=True)
def has_cudnn(install, monkeypatch, caplog):
    monkeypatch.setattr(expansions, "at_least", lambda queries: expansions.MANY)  # small as problems are here
    caplog.set_level(logging.INFO, logger=choose.__name__)
    monkeypatch.setattr(torch.ops.aten, OP, attention)
    monkeypatch.setattr(cudnn, "_PROCESSORS", 1)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)


def exact(x):
    named = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
    return expanded_attention_reference(
        **{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in named.items()}
    )


SHAPES = {
    "a first prompt": {},
    "more keys than queries": {"tokens": 12},
    "no limit": {"tokens": 12, "offset": None},
    "a context": {"tokens": 20, "offset": 11},
    "a context, and no more keys": {"tokens": 20, "offset": 30},
    "one sequence at a time": {"workspace_tokens": 9},
    "groups of heads": {"tokens": 24, "queries": 24, "workspace_tokens": 12},
    "a latent for keys and one for values": {
        "w_uk": torch.randn(4, P, 20).bfloat16() / 5,
        "w_uv": torch.randn(4, V, L - 20).bfloat16() / 3,
        "workspace_tokens": 9,
    },
    "rope keys of each head": {"k_rope": torch.randn(3, 9, 4, R).bfloat16(), "workspace_tokens": 9},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_right(shape):
    x = problem(**shape)
    o, lse = cudnn.CUDNN.attend(torch, x)
    expected, expected_lse = exact(x)
    # Keys, values and results are rounded to 8 bits.
    assert (o.double() - expected).abs().max() <= 2**-6 * expected.abs().max()
    assert (lse.double() - expected_lse).abs().max() <= 2**-5
    assert (o.is_contiguous(), lse.is_contiguous(), lse.dtype) == (True, True, torch.float32)


@pytest.mark.parametrize("offset", [None, 0, 4])
def test_torch_takes_the_call_and_gives_these_shapes(monkeypatch, offset):
    monkeypatch.undo()
    o, lse = cudnn.CUDNN.attend(torch, problem(tokens=13, offset=offset, device="meta"))
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == ((3, 9, 4, V), torch.bfloat16, (3, 9, 4), torch.float32)


REORDERED = {
    "heads before queries": lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
    "columns apart": lambda q: q.transpose(1, 3).contiguous().transpose(1, 3),
    "rows at odd places": lambda q: torch.nn.functional.pad(q, (1, 0))[..., 1:],
}


@pytest.mark.parametrize("reordered", REORDERED.values(), ids=REORDERED)
def test_any_strides(reordered):
    x = problem(tokens=20, offset=11)
    other = dataclasses.replace(x, q=reordered(x.q))
    for found, expected in zip(cudnn.CUDNN.attend(torch, other), cudnn.CUDNN.attend(torch, x), strict=True):
        assert torch.equal(found, expected)


def test_no_workspace_is_larger_than_it_may_be(monkeypatch):
    made = []
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda t, size, **k: made.append(tuple(size)) or new_empty(t, size, **k)
    )
    for processors in (0, 1):
        monkeypatch.setattr(cudnn, "_PROCESSORS", processors)
        cudnn.CUDNN.attend(torch, problem(24, 24, workspace_tokens=12))
    keys = [size for size in made if size[-1] == P + R]
    few = [(2, 24, P + R)] * 6  # two heads of a sequence at a time: 2 * 24 keys = 4 * 12
    assert keys == few + [(4, 24, P + R)] * 3  # unless so few do not keep the device busy


REFUSED = {
    "a mask": ({"mask": torch.ones(1, 1, 1, 9, dtype=torch.bool)}, "does not take a mask"),
    "queries without keys": ({"tokens": 9, "offset": -2}, "does not take queries that see no key"),
    "a workspace for less than a head": (
        {"tokens": 90, "queries": 90, "workspace_tokens": 20},
        "takes all keys of a head at once, which do not fit the workspace",
    ),
    "one key": ({"tokens": 1}, "does not take one key on its own"),
    "a context of one key": ({"tokens": 10, "offset": 1}, "does not take one key on its own"),
    "no sequences": ({"batch": 0}, "does not take empty tensors"),
    "no queries": ({"queries": 0, "offset": None}, "does not take empty tensors"),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_ours_computes_the_rest_with_a_reason(caplog, change, reason):
    x = problem(**change)
    choose.attend(EXPANDED, x, H100, by_aten)
    assert caplog.messages == [f"mla::expanded_attention: triton; cuDNN {reason}"]


@pytest.mark.parametrize("offset", [None, 0, 5])
def test_it_runs_where_it_was_measured_to_be_faster(caplog, offset):
    x = problem(tokens=14, offset=offset)
    with tuning.tuning(lambda call: {"triton": 2.0, "cuDNN": 1.0}[call.args[0]]):
        results = choose.attend(EXPANDED, x, H100, by_aten)
    assert caplog.messages == ["mla::expanded_attention: cuDNN"]
    for result, expected in zip(results, cudnn.CUDNN.attend(torch, x), strict=True):
        torch.testing.assert_close(result, expected, atol=0, rtol=0)


def test_prompts_that_go_on_are_tried_once(monkeypatch):
    tried = []
    small = expansions.small
    monkeypatch.setattr(choose, "disagreement", lambda x, *ways: tried.append(x.causal_offset))
    assert (small(problem(tokens=14, offset=5)).causal_offset, small(problem()).causal_offset) == (5, 0)
    with tuning.tuning(lambda call: {"triton": 2.0, "cuDNN": 1.0}[call.args[0]]):
        for offset in (5, 14, 200):
            choose.attend(EXPANDED, problem(tokens=offset + 9, offset=offset), H100, by_aten)
    assert tried == [5]


def test_a_limit_that_ends_at_the_last_key_would_be_seen(monkeypatch):
    def from_the_end(query, key, value, *rest, scale):
        spare = key.shape[2] - query.shape[2]
        return attention(query, key[:, :, spare:], value[:, :, spare:], *rest, scale=scale)

    monkeypatch.setattr(torch.ops.aten, OP, from_the_end)
    x = expansions.small(problem(offset=None))
    assert "another o" in choose.disagreement(x, lambda x: cudnn.CUDNN.attend(torch, x), by_aten)


def test_few_queries_are_left_to_ours(caplog, monkeypatch):
    """cuDNN prepares each new length, and few queries gain nothing that is worth it."""
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    few, many = problem(batch=1), problem(queries=512, tokens=512, batch=8, heads=1)
    assert str(choose.foreseen(EXPANDED, few, H100)).endswith("triton; cuDNN is not known to be faster")
    assert choose.foreseen(EXPANDED, dataclasses.replace(many, workspace_tokens=4096), H100).name == "cuDNN"


def test_a_trial_without_memory_is_made_again(caplog):
    """What runs out of memory says nothing about cuDNN: ours computes, and the next call tries anew."""
    x, full = problem(), [True]

    def ours(bundle):
        if full and bundle is not x:
            raise torch.OutOfMemoryError
        return by_aten(bundle)

    for result, expected in zip(choose.attend(EXPANDED, x, H100, ours), by_aten(x), strict=True):
        torch.testing.assert_close(result, expected, atol=0, rtol=0)
    assert caplog.messages == []
    full.clear()
    choose.attend(EXPANDED, x, H100, ours)
    assert caplog.messages == ["mla::expanded_attention: cuDNN"]


@pytest.mark.parametrize(("told", "taken"), [(None, ["cuDNN"]), ("triton", [])])
def test_the_op_takes_it_unless_it_is_told_otherwise(monkeypatch, caplog, told, taken):
    monkeypatch.setattr(machine, "present", lambda device: H100)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(triton, "expanded_attention_triton", lambda x, machine: by_aten(x))
    expanded_attention_gpu(**vars(problem(kernels=told)))
    assert [message.rpartition(" ")[2] for message in caplog.messages] == taken


def test_the_op_measures_if_told(monkeypatch, caplog):
    monkeypatch.setattr(machine, "present", lambda device: H100)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(triton, "expanded_attention_triton", lambda x, machine: by_aten(x))
    monkeypatch.setattr(tuning, "device_seconds", lambda call: {"triton": 1.0, "cuDNN": 2.0}[call.args[0]])
    expanded_attention_gpu(**vars(problem(measure=True)))
    assert caplog.messages == ["mla::expanded_attention: triton; cuDNN is not known to be faster"]
