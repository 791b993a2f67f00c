"""Gradients by cuDNN's attention: computed by a stand-in on CPU; torch's own, on meta tensors, gives shapes."""

import contextlib
import dataclasses
import logging

import pytest
import torch

pytest.importorskip("triton")

from mla_compile.kernels._common import machine, tuning
from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels.backward import attend_backward, triton
from mla_compile.kernels.expanded_attention import expanded_attention_backward_gpu, expanded_attention_reference
from mla_compile.kernels.expanded_attention.arguments import ExpandedAttention, ExpandedAttentionBackward
from mla_compile.kernels.implementations import choose, cudnn, expansions, gradients
from mla_compile.kernels.implementations.cudnn_backward import CUDNN_BACKWARD
from mla_compile.kernels.implementations.table import GRADIENTS

from . import test_choose, test_cudnn
from .test_cudnn import H100, L, P, R, V

OP = "_scaled_dot_product_cudnn_attention_backward"
NAMES = ("q", "latent", "k_rope", "w_uk", "w_uv")
ALL = [True] * 5 + [False]


def exact(x):
    """o and lse, and the function from the gradient of o to the operands', in float64."""
    named = {field.name: getattr(x, field.name) for field in dataclasses.fields(ExpandedAttention)}
    leaves = {name: named[name].double().requires_grad_() for name in NAMES}
    with torch.enable_grad():
        o, lse = expanded_attention_reference(**named | leaves)
    return o, lse, lambda grad_o: torch.autograd.grad(o, list(leaves.values()), grad_o.double())


def problem(*sizes, wanted=ALL, grad_lse=None, kernels=None, measure=False, with_exact=False, **named):
    """A call of the backward, after a forward whose results are those of float64, rounded."""
    x = test_cudnn.problem(*sizes, **named)
    operands = vars(x) | {"kernels": kernels, "measure": measure}
    (o, lse), differentiate = torch.zeros(2), None
    if x.q.device.type == "meta":
        o, lse = x.q.new_empty((*x.q.shape[:3], V)), x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    elif x.causal_offset is None or x.causal_offset >= 0:
        o, lse, differentiate = exact(x)
        o, lse = o.detach().to(x.q.dtype), lse.detach().float().contiguous()
    grad_o = torch.randn(o.shape, device=o.device).to(o.dtype)
    made = ExpandedAttentionBackward(**operands, grad_o=grad_o, grad_lse=grad_lse, o=o, lse=lse, wanted=wanted)
    return (made, differentiate(grad_o)) if with_exact else made


def backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    philox_seed,
    philox_offset,
    attn_bias,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *,
    scale=None,
):
    """A stand-in with the signature of torch's op, computed in float32 from the lse that it is given."""
    (batch, heads, queries, _), tokens = query.shape, key.shape[2]
    assert (attn_bias, cum_seq_q, cum_seq_k, dropout_p, max_q, max_k) == (None, None, None, 0.0, queries, tokens)
    assert (logsumexp.shape, logsumexp.dtype) == ((batch, heads, queries, 1), torch.float32)
    assert logsumexp.is_contiguous()
    assert philox_seed.dtype == philox_offset.dtype == torch.int64
    assert out.stride() == grad_out.stride()
    for t in (grad_out, query, key, value, out):
        assert t.data_ptr() % 16 == 0
        assert t.stride(3) == 1
        assert all(stride % 8 == 0 for stride in t.stride()[:3])
    do, q, k, v, o = (t.float() for t in (grad_out, query, key, value, out))
    weights = (q @ k.mT * scale - logsumexp).exp()
    if is_causal:
        weights = weights.tril()
    of_scores = weights * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
    found = of_scores @ k, of_scores.mT @ q, weights.mT @ do
    return tuple(torch.empty_like(like).copy_(grad) for grad, like in zip(found, (query, key, value), strict=True))


@pytest.fixture(autouse=True)
def has_cudnn(install, monkeypatch, caplog):
    monkeypatch.setattr(expansions, "at_least", lambda queries: expansions.MANY)  # small as problems are here
    caplog.set_level(logging.INFO, logger=choose.__name__)
    monkeypatch.setattr(torch.ops.aten, OP, backward)
    monkeypatch.setattr(cudnn, "_PROCESSORS", 1)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)


def strided(x):
    """The same numbers in other strides, none of which cuDNN takes for all of them."""
    return dataclasses.replace(
        x,
        q=x.q.transpose(1, 3).contiguous().transpose(1, 3),
        latent=x.latent.transpose(0, 1).contiguous().transpose(0, 1),
        k_rope=x.k_rope.transpose(1, 2).contiguous().transpose(1, 2),
        grad_o=x.grad_o.transpose(1, 2).contiguous().transpose(1, 2),
        o=torch.nn.functional.pad(x.o, (1, 0))[..., 1:],
        lse=x.lse.transpose(1, 2).contiguous().transpose(1, 2),
    )


SHAPES = test_cudnn.SHAPES | {
    "a context, one sequence at a time": {"tokens": 20, "offset": 11, "workspace_tokens": 20},
    "fewer keys than queries": {"tokens": 5},
    "fewer keys than queries, after a context": {"tokens": 7, "offset": 3},
    "one query": {"queries": 1, "tokens": 12, "offset": 11},
    "float16": {"dtype": torch.float16},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_right(shape):
    x, expected = problem(**shape, with_exact=True)
    for found, truth, operand in zip(CUDNN_BACKWARD.attend(torch, x), expected, x.operands[:5], strict=True):
        assert (found.shape, found.dtype) == (operand.shape, operand.dtype)
        # Keys, values, o and results are rounded to 8 bits, and a score's gradient is a difference of two such sums.
        assert (found.double() - truth).abs().max() <= 2**-6 * truth.abs().max()


@pytest.mark.parametrize("offset", [None, 0, 4])
def test_any_strides(offset):
    x = problem(tokens=13, offset=offset, workspace_tokens=14)
    for found, expected in zip(CUDNN_BACKWARD.attend(torch, strided(x)), CUDNN_BACKWARD.attend(torch, x), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("offset", [None, 0, 4])
def test_torch_takes_the_call_and_gives_these_shapes(monkeypatch, offset):
    monkeypatch.undo()
    x = problem(tokens=13, offset=offset, device="meta")
    found = CUDNN_BACKWARD.attend(torch, x)
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in x.operands[:5]]


def test_keys_that_no_query_sees_may_hold_nan_and_have_no_gradient():
    x = problem(tokens=20, offset=5)
    x.latent[:, 14:], x.k_rope[:, 14:] = torch.nan, torch.nan
    dq, d_latent, d_k_rope, *of_weights = CUDNN_BACKWARD.attend(torch, x)
    assert all(t.isfinite().all() for t in (dq, d_latent, d_k_rope, *of_weights))
    assert not d_latent[:, 14:].any()
    assert not d_k_rope[:, 14:].any()


@pytest.mark.parametrize("wanted", [1, 2, 8, 22])
def test_only_what_is_wanted_is_returned(wanted):
    flags = [bool(wanted >> i & 1) for i in range(6)]
    x = problem()
    every = CUDNN_BACKWARD.attend(torch, x)
    some = CUDNN_BACKWARD.attend(torch, dataclasses.replace(x, wanted=flags))
    for found, expected in zip(some, [t for t, flag in zip(every, flags, strict=False) if flag], strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("workspace_tokens", "processors", "groups"),
    [(12, 0, [(1, 2)] * 6), (12, 1, [(1, 4)] * 3), (24, 0, [(1, 4)] * 3), (48, 0, [(2, 4), (1, 4)])],
)
def test_heads_and_sequences_in_groups(monkeypatch, workspace_tokens, processors, groups):
    found = []
    monkeypatch.setattr(cudnn, "_PROCESSORS", processors)
    monkeypatch.setattr(
        torch.ops.aten, OP, lambda do, q, *rest, **named: found.append(q.shape[:2]) or backward(do, q, *rest, **named)
    )
    CUDNN_BACKWARD.attend(torch, problem(24, 24, workspace_tokens=workspace_tokens))
    assert found == groups


@pytest.mark.parametrize("offset", [None, 0, 5])
def test_it_is_taken_on_hopper_once_it_agreed(caplog, offset):
    x, tried = problem(tokens=14, offset=offset), []
    results = choose.attend(GRADIENTS, x, H100, lambda x: tried.append(x.q.shape) or attend_backward(x))
    assert caplog.messages == ["mla::expanded_attention_backward: cuDNN"]
    assert tried == [(2, 70, 4, P + R)]
    for found, expected in zip(results, CUDNN_BACKWARD.attend(torch, x), strict=True):
        assert torch.equal(found, expected)


REFUSED = {
    "a mask": ({"mask": torch.ones(1, 1, 1, 9, dtype=torch.bool)}, "does not take a mask"),
    "a gradient of lse": ({"grad_lse": torch.ones(3, 9, 4)}, "does not take a gradient of lse"),
    "float32": ({"dtype": torch.float32}, "does not take torch.float32"),
    "one key": ({"tokens": 1}, "does not take one key on its own"),
    "a context of one key": ({"tokens": 10, "offset": 1}, "does not take one key on its own"),
    "no keys": ({"tokens": 0, "offset": None}, "does not take empty tensors"),
    "no queries": ({"queries": 0}, "does not take empty tensors"),
    "no sequences": ({"batch": 0}, "does not take empty tensors"),
    "wider values": ({"w_uv": torch.zeros(4, V + 1, L).bfloat16()}, "takes P, R, V = 128, 64, 128, found 128, 64, 129"),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_ours_computes_the_rest_with_a_reason(caplog, change, reason):
    choose.attend(GRADIENTS, problem(**change), H100, lambda x: [])
    assert caplog.messages == [f"mla::expanded_attention_backward: triton; cuDNN {reason}"]


def test_early_versions_are_refused(monkeypatch, caplog):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    choose.attend(GRADIENTS, problem(), H100, lambda x: [])
    (line,) = caplog.messages
    assert line.endswith("triton; cuDNN has to be 9.15.1 or later, found 9.10.2")


def test_queries_that_see_no_key_are_refused(caplog):
    x = dataclasses.replace(problem(), causal_offset=-2)
    choose.attend(GRADIENTS, x, H100, lambda x: [])
    assert caplog.messages == ["mla::expanded_attention_backward: triton; cuDNN does not take queries that see no key"]


@pytest.fixture
def on(monkeypatch):
    """A function after which the op runs as on a machine, with ATen operations in place of our kernels."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(triton, "attend_backward_triton", lambda x, machine: attend_backward(x))
    return lambda present: monkeypatch.setattr(machine, "present", lambda device: present)


@pytest.mark.parametrize(("told", "taken"), [(None, ["cuDNN"]), ("triton", [])])
def test_the_op_takes_it_unless_it_is_told_otherwise(on, caplog, told, taken):
    on(H100)
    expanded_attention_backward_gpu(**vars(problem(kernels=told)))
    assert [message.rpartition(" ")[2] for message in caplog.messages] == taken


@pytest.mark.parametrize(
    ("seconds", "fastest"), [({"triton": 1.0, "cuDNN": 2.0}, "triton"), ({"triton": 2.0, "cuDNN": 1.0}, "cuDNN")]
)
@pytest.mark.parametrize("present", [H100, Machine("sm_100", 148)], ids=lambda machine: machine.arch)
def test_the_op_measures_if_told_and_the_fastest_is_kept_on_disk(
    install, monkeypatch, on, caplog, present, seconds, fastest
):
    on(present)
    x, timed = problem(measure=True), test_choose.Timed(**seconds)
    monkeypatch.setattr(tuning, "device_seconds", timed)
    for _ in range(2):
        expanded_attention_backward_gpu(**vars(x))
    expanded_attention_backward_gpu(**vars(dataclasses.replace(x, wanted=[True] + [False] * 5)))
    assert timed.asked == ["triton", "cuDNN"] * 2  # some of the gradients are another problem
    install()  # another process
    expanded_attention_backward_gpu(**vars(x))
    assert timed.asked == ["triton", "cuDNN"] * 2
    chosen = [message.partition(": ")[2].partition(";")[0] for message in caplog.messages]
    assert chosen == [fastest] * 3
    assert not tuning.is_on()


def test_what_is_not_told_to_measure_takes_another_choice(monkeypatch, on, caplog):
    on(H100)
    monkeypatch.setattr(tuning, "device_seconds", test_choose.Timed(triton=1.0, cuDNN=2.0))
    for measure in (True, False):
        expanded_attention_backward_gpu(**vars(problem(measure=measure)))
    chosen = [message.partition(": ")[2].partition(";")[0] for message in caplog.messages]
    assert chosen == ["triton", "cuDNN"]


def test_the_trial_takes_the_tiles_of_the_table(on):
    on(H100)
    tunes = []
    with tuning.tuning(lambda call: 1.0):
        choose.attend(GRADIENTS, problem(), H100, lambda x: tunes.append(tuning.is_on()) or attend_backward(x))
    assert tunes == [False, True, True]  # the trial; compared, by its fastest tiles; the call


def test_it_may_differ_from_run_to_run_and_so_is_refused_where_that_is_forbidden(caplog):
    before = torch.are_deterministic_algorithms_enabled()
    x = problem()
    try:
        for forbidden in (False, True):
            torch.use_deterministic_algorithms(forbidden)
            choose.attend(GRADIENTS, x, H100, attend_backward)
    finally:
        torch.use_deterministic_algorithms(before)
    allowed, refused = caplog.messages
    assert allowed == "mla::expanded_attention_backward: cuDNN"
    assert refused == "mla::expanded_attention_backward: triton; cuDNN does not take deterministic algorithms"


def test_elsewhere_it_has_to_be_measured(caplog):
    x, blackwell = problem(), Machine("sm_100", 148)
    choose.attend(GRADIENTS, x, blackwell, attend_backward)
    with tuning.tuning(lambda call: {"triton": 2.0, "cuDNN": 1.0}[call.args[0]]):
        choose.attend(
            GRADIENTS,
            dataclasses.replace(x, wanted=[True, False, True, False, True, False]),
            blackwell,
            attend_backward,
        )
    before, measured = caplog.messages
    assert before == "mla::expanded_attention_backward: triton; cuDNN is not known to be faster"
    assert measured == "mla::expanded_attention_backward: cuDNN"


def with_the_lse_of_its_part(grad_out, query, key, value, out, logsumexp, *rest, scale):
    """What a backward computes that finds the log-sum-exp of the keys that it is given, and not of all."""
    scores = query.float() @ key.float().mT * scale
    scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1) & rest[-1], -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return backward(grad_out, query, key, value, out, lse, *rest, scale=scale)


def with_lse_in_bits(grad_out, query, key, value, out, logsumexp, *rest, scale):
    """What a backward computes that takes the log-sum-exp for one to the base 2."""
    return backward(grad_out, query, key, value, out, logsumexp * 0.6931, *rest, scale=scale)


@pytest.mark.parametrize(("wrong", "offset"), [(with_the_lse_of_its_part, 30), (with_lse_in_bits, 0)])
def test_another_meaning_would_be_seen(monkeypatch, wrong, offset):
    monkeypatch.setattr(torch.ops.aten, OP, wrong)
    small = gradients.small(problem(tokens=60, offset=offset))
    found = choose.disagreement(
        small, lambda x: CUDNN_BACKWARD.attend(torch, x), attend_backward, gradients.results_of(small)
    )
    assert found == "gives another dq than expected on a small problem"
