"""Gradients of mla::expanded_attention against float64, for many sizes, masks, dtypes and workspaces."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mla_compile.errors import KernelError
from mla_compile.kernels import visibility
from mla_compile.kernels.backward import aten, native
from tests.memory import peak

from .errors import assert_as_close_as
from .naive import MASKS, Case, Inputs, case_of, make_inputs

expanded_attention = torch.ops.mla.expanded_attention
expanded_attention_backward = torch.ops.mla.expanded_attention_backward

# B, Sq, T, N, L, P, R, V
SIZES = {
    "decode": (2, 1, 20, 4, 12, 8, 4, 8),
    "square": (2, 23, 23, 5, 12, 6, 4, 6),
    "after a context": (2, 13, 31, 3, 11, 7, 5, 9),
    "no rope, wide values": (3, 9, 20, 2, 16, 5, 0, 12),
    "one key": (2, 1, 1, 1, 5, 3, 1, 2),
    "several blocks": (2, 150, 210, 2, 12, 40, 6, 34),
}
NAMES = ("q", "latent", "k_rope", "w_uk", "w_uv")


@pytest.fixture(params=["native", "aten"])
def computed_by(request):
    """Each way to compute the gradients: a C++ kernel, and ATen operations alone."""
    if request.param == "aten":
        request.getfixturevalue("no_compiler")
    return request.param


each_way = pytest.mark.usefixtures("computed_by")


def equation(operands: tuple[Tensor, ...], case: Case, scale: float) -> tuple[Tensor, Tensor]:
    """The op as an equation, whose gradients are finite also where a row sees no key; lse is 0 there."""
    (q, _, k_rope, w_uk, w_uv), (mask, offset) = operands, case
    of_keys, of_values = Inputs(*operands, scale).latents
    nope = torch.einsum("bsnp,npl,btl->bnst", q[..., : w_uk.shape[1]], w_uk, of_keys)
    rope = "bsnr,btr->bnst" if k_rope.dim() == 3 else "bsnr,btnr->bnst"
    scores = scale * (nope + torch.einsum(rope, q[..., w_uk.shape[1] :], k_rope))
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if offset is not None:
        seen &= torch.arange(scores.shape[3]) <= torch.arange(scores.shape[2])[:, None] + offset
    if mask is not None and mask.dtype == torch.bool:
        seen &= mask
    elif mask is not None:
        seen &= (mask != -torch.inf).expand(seen.shape)
        scores = scores + mask.to(scores.dtype).where(mask != -torch.inf, 0)
    there = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen & there, -torch.inf)
    weights = scores.softmax(-1) * there
    o = torch.einsum("bnst,btl,nvl->bsnv", weights, of_values, w_uv)
    return o, (scores.logsumexp(-1, keepdim=True) * there).squeeze(-1).transpose(1, 2)


def gradients(function, x: Inputs, case: Case, direction: tuple[Tensor, Tensor | None], *rest) -> tuple[Tensor, ...]:
    """The gradients of the operands, for given gradients (`direction`) of o and, where it is finite, of lse."""
    operands = [t.detach().requires_grad_() for t in x.tensors]
    o, lse = function(operands, case, x.scale, *rest)
    total = (o * direction[0].to(o.dtype)).sum()
    if direction[1] is not None:
        total = total + (lse.masked_fill(lse == -torch.inf, 0) * direction[1].to(lse.dtype)).sum()
    return torch.autograd.grad(total, operands)


def op(operands, case, scale, workspace_tokens):
    return expanded_attention(*operands, *case, scale, workspace_tokens)


def directions(x: Inputs, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    shape = *x.q.shape[:3], x.w_uv.shape[1]
    return torch.randn(shape, dtype=torch.float64), torch.randn(shape[:3], dtype=torch.float64) if with_lse else None


def assert_right(x, case, workspace_tokens, with_lse=False):
    """Check every gradient against float64; autograd of the equation in the inputs' dtype is the measure of error."""
    with torch.enable_grad():
        direction = directions(x, with_lse)
        exact = gradients(equation, x.map(Tensor.double), case, direction)
        measure = gradients(equation, x, case, direction)
        actual = gradients(op, x, case, direction, workspace_tokens)
    for plain, ours, truth in zip(measure, actual, exact, strict=True):
        assert truth.isfinite().all()
        if not truth.numel():
            continue  # a rope key without columns
        # A weight is exp(score - lse); score and lse are up to 16 here, and each is rounded by half an eps of that.
        # Each chunk of keys rounds lse, of up to 8 then, again, up or down.
        chunks = math.ceil(x.latent.shape[1] / workspace_tokens)
        assert_as_close_as(plain, ours, truth, merges=32 + math.ceil(8 * math.sqrt(chunks)))


@each_way
@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_float32(sizes, mask):
    case = case_of(sizes, mask)
    assert_right(make_inputs(sizes), case, workspace_tokens=32)


@each_way
@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_rope_keys_of_each_head(sizes, mask):
    case = case_of(sizes, mask)
    assert_right(make_inputs(sizes).with_own_ropes(), case, workspace_tokens=2)


@each_way
@pytest.mark.diagonal
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_latent_for_keys_and_one_for_values(sizes, mask):
    assert_right(make_inputs(sizes).with_two_latents(sizes[4] // 3), case_of(sizes, mask), workspace_tokens=2)


@each_way
@pytest.mark.diagonal
@pytest.mark.parametrize("mask", [name for name in MASKS if name != "bias of finfo.min"])
@pytest.mark.parametrize("sizes", [SIZES["square"], SIZES["after a context"]], ids=["square", "after a context"])
def test_of_the_log_sum_exp(sizes, mask):
    """Without `bias of finfo.min`: where that hides all keys of a row, lse is rounded to that number."""
    case = case_of(sizes, mask)
    assert_right(make_inputs(sizes), case, workspace_tokens=32, with_lse=True)


@each_way
@pytest.mark.parametrize("mask", ["none", "causal", "left padding and causal", "scattered keys", "bias"])
@pytest.mark.parametrize("workspace_tokens", [1, 4, 1000])
def test_groups_of_heads(monkeypatch, computed_by, mask, workspace_tokens):
    """A small workspace has room for the keys of one head, a large one for those of all heads."""
    sizes = (2, 19, 40, 7, 12, 6, 4, 6)
    case = case_of(sizes, mask)
    groups = []
    add, attend = aten._add_group, native._attend
    monkeypatch.setattr(aten, "_add_group", lambda rows, *rest: (groups.append(rows.q.shape[0]), add(rows, *rest)))
    monkeypatch.setattr(native, "_attend", lambda *all: (groups.append(all[1].q.shape[::2]), attend(*all))[1])
    assert_right(make_inputs(sizes), case, workspace_tokens)
    if computed_by == "native":
        assert groups == {1: [(1, 1)] * 14, 4: [(1, 1)] * 14, 1000: [(2, 7)]}[workspace_tokens]
    else:
        assert groups == {1: [1] * 14, 4: [1] * 14, 1000: [7] * 2}[workspace_tokens]


@pytest.mark.parametrize("mask", ["none", "causal", "left padding and causal", "causal, first queries see nothing"])
def test_queries_a_part_at_a_time(monkeypatch, mask):
    monkeypatch.setattr(native, "_QUERIES", 40)
    sizes = (2, 90, 110, 3, 12, 6, 4, 6)
    assert_right(make_inputs(sizes), case_of(sizes, mask), workspace_tokens=32)


def laid_out(t: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same numbers, with the dims of `order` from the outermost to the innermost in memory."""
    return t.permute(order).contiguous().permute([order.index(i) for i in range(t.dim())])


@each_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("innermost", [0, 1, 2, 3])
def test_operands_of_any_strides(innermost, dtype):
    """A projection by a convolution, for instance, gives queries whose tokens are innermost."""
    x, settings = make_inputs((2, 7, 9, 3, 12, 6, 4, 6), dtype), (None, 2, 0.3, 32)
    o, lse = expanded_attention(*x.tensors, *settings)
    direction = torch.randn_like(o)
    order = (*(i for i in range(4) if i != innermost), innermost)
    latent, k_rope = (laid_out(t, (0, 2, 1)) for t in (x.latent, x.k_rope))
    q, do, out = (laid_out(t, order) for t in (x.q, direction, o))
    weights = [laid_out(w, (2, 0, 1)) for w in (x.w_uk, x.w_uv)]
    for wanted in ([True] * 5 + [False], [True] + [False] * 5):
        exact = expanded_attention_backward(direction, None, *x.tensors, *settings, o, lse, wanted)
        found = expanded_attention_backward(do, None, q, latent, k_rope, *weights, *settings, out, lse, wanted)
        for ours, expected in zip(found, exact, strict=True):
            torch.testing.assert_close(ours, expected)


def test_several_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    sizes = (2, 90, 110, 5, 12, 6, 4, 6)
    assert_right(make_inputs(sizes), case_of(sizes, "causal"), workspace_tokens=32)


@each_way
@pytest.mark.parametrize("mask", ["none", "causal", "left padding and causal", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(2, 23, 31, 5, 12, 6, 4, 6), (1, 133, 101, 2, 12, 37, 5, 33)], ids=str)
def test_half_precision(sizes, mask, dtype):
    case = case_of(sizes, mask)
    assert_right(make_inputs(sizes, dtype), case, workspace_tokens=16)


@pytest.mark.parametrize("mask", ["none", "causal", "causal, first queries see nothing", "scattered keys", "bias"])
def test_gradcheck(mask):
    sizes = (2, 3, 4, 2, 3, 2, 2, 2)
    case = case_of(sizes, mask)
    x = make_inputs(sizes, torch.float64)
    case = (case[0].double() if case[0] is not None and case[0].is_floating_point() else case[0], case[1])
    operands = [t.detach().clone().requires_grad_() for t in x.tensors]
    with torch.enable_grad():
        assert torch.autograd.gradcheck(lambda *given: op(given, case, x.scale, 4)[0], operands)


@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (1, 1, 7, 9), (2, 1, 1, 9), (1, 3, 7, 1)], ids=str)
def test_a_bias_that_learns(shape):
    x, offset = make_inputs((2, 7, 9, 3, 8, 4, 2, 4)), 2
    direction = directions(x, with_lse=True)
    found = []
    with torch.enable_grad():
        for function, dtype in ((equation, torch.float64), (equation, torch.float32), (op, torch.float32)):
            torch.manual_seed(1)
            bias = torch.randn(shape).to(dtype).requires_grad_()
            operands = x.map(lambda t, dtype=dtype: t.to(dtype)).tensors
            o, lse = function(operands, (bias, offset), x.scale, *([2] if function is op else []))
            total = (o * direction[0].to(dtype)).sum() + (lse * direction[1].to(lse.dtype)).sum()
            found += torch.autograd.grad(total, bias)
    exact, measure, actual = found
    assert_as_close_as(measure, actual, exact, merges=32)  # as in `assert_right`


@pytest.mark.parametrize("wanted", range(1, 32))
def test_only_what_is_wanted_is_computed(wanted):
    x = make_inputs((2, 5, 9, 3, 8, 4, 2, 4))
    flags = [bool(wanted >> i & 1) for i in range(5)]
    o, lse = op(x.tensors, (None, 4), x.scale, 8)
    arguments = torch.randn_like(o), None, *x.tensors, None, 4, x.scale, 8, o, lse
    every = expanded_attention_backward(*arguments, [True] * 5 + [False])
    some = expanded_attention_backward(*arguments, [*flags, False])
    for actual, expected in zip(some, [g for g, flag in zip(every, flags, strict=True) if flag], strict=True):
        assert torch.equal(actual, expected)


def test_frozen_weights_ask_for_no_gradient():
    asked = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is expanded_attention_backward.default:
                asked.append(list(args[-1]))
            return func(*args, **(kwargs or {}))

    x = make_inputs((1, 5, 5, 3, 8, 4, 2, 4))
    operands = [t.detach().requires_grad_(name in ("q", "latent")) for name, t in zip(NAMES, x.tensors, strict=True)]
    with torch.enable_grad(), Calls():
        op(operands, (None, 0), x.scale, 8)[0].sum().backward()
    assert asked == [[True, True, False, False, False, False]]


@each_way
@pytest.mark.parametrize("synchronous", [True, False])
def test_keys_that_no_query_sees_may_hold_nan_and_have_no_gradient(monkeypatch, synchronous):
    monkeypatch.setattr(visibility, "reads_values", lambda mask: synchronous)
    monkeypatch.setattr(aten, "reads_values", lambda mask: synchronous)
    x = make_inputs((2, 6, 30, 4, 12, 6, 4, 6))
    mask = (torch.arange(30) % 7 != 3) & (torch.rand(2, 1, 6, 30) < 0.7)
    unseen = ~mask.any(2)[:, 0]
    assert unseen.any()
    direction = directions(x, with_lse=False)
    with torch.enable_grad():
        expected = gradients(op, x, (mask, None), direction, 16)
        x.latent[unseen], x.k_rope[unseen] = torch.nan, torch.nan
        actual = gradients(op, x, (mask, None), direction, 16)
    for ours, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, wanted)
    assert not actual[1][unseen].any()
    assert not actual[2][unseen].any()


@each_way
@pytest.mark.parametrize("case", [(None, 0), (torch.ones(1, 1, 1024, 1024, dtype=torch.bool).tril(), None)])
def test_memory_is_bounded(case):
    """Besides the gradients there are the keys and values of one head, and scores of a tile of 256 queries."""
    heads, tokens, workspace_tokens, rank, width = 32, 1024, 128, 32, 24
    x = make_inputs((1, tokens, tokens, heads, rank, 16, 8, 16))
    o, lse = op(x.tensors, case, x.scale, workspace_tokens)
    arguments = torch.ones_like(o), None, *x.tensors, *case, x.scale, workspace_tokens, o, lse
    taken = peak(lambda: expanded_attention_backward(*arguments, [True] * 5 + [False]))
    # Operands of flash attention (q, k, v, do, o) and their gradients; the cache in order, and its gradient.
    of_a_head = tokens * (8 * width + 2 * (rank + 8)) * 4
    of_a_tile = 3 * 256 * tokens * 4  # scores, their gradients, and a bias
    assert taken <= sum(t.nbytes for t in x.tensors) + of_a_head + of_a_tile


@pytest.mark.parametrize("case", [(None, None), (None, 2), (torch.rand(1, 1, 3, 5) < 0.5, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype, case):
    shared = make_inputs((2, 3, 5, 4, 24, 8, 8, 8), dtype)
    for x in (shared, shared.with_own_ropes(), shared.with_two_latents(10)):
        o, lse = op(x.tensors, case, x.scale, 2)
        arguments = torch.randn_like(o), None, *x.tensors, *case, x.scale, 2, o, lse, [True] * 5 + [False]
        torch.library.opcheck(expanded_attention_backward.default, arguments)


def test_refuses_another_shape():
    x = make_inputs((1, 5, 5, 3, 8, 4, 2, 4))
    o, lse = op(x.tensors, (None, 0), x.scale, 8)
    with pytest.raises(KernelError, match=r"expected grad_o of shape \[B, Sq, N, V\] = \[1, 5, 3, 4\], found"):
        expanded_attention_backward(o[:, 1:], None, *x.tensors, None, 0, x.scale, 8, o, lse, [True] * 6)


def test_a_gradient_of_a_gradient_is_refused():
    x = make_inputs((1, 5, 5, 3, 8, 4, 2, 4))
    q, *others = (t.detach().requires_grad_() for t in x.tensors)
    with torch.enable_grad():
        o, _ = op((q, *others), (None, 0), x.scale, 8)
        (first,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="mla::expanded_attention_backward has no backward"):
            first.sum().backward()
