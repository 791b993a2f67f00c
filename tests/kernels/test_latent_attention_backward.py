"""Gradients of mla::latent_attention, against those of expanded attention with identities as up-projections."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mla_compile.errors import KernelError
from tests.memory import peak

from .errors import assert_as_close_as
from .naive import MASKS, Case, case_of, masks
from .test_expanded_attention_backward import equation

latent_attention = torch.ops.mla.latent_attention
latent_attention_backward = torch.ops.mla.latent_attention_backward

# B, Sq, T, N, L, R
SIZES = {
    "decode": (2, 1, 20, 4, 12, 4),
    "after a context": (2, 13, 31, 3, 11, 5),
    "no rope": (3, 9, 20, 2, 16, 0),
    "one key": (2, 1, 1, 1, 5, 1),
}
SCALE = 0.4


def make(sizes, dtype=torch.float32) -> tuple[Tensor, ...]:
    batch, queries, keys, heads, rank, rope = sizes
    shapes = (batch, queries, heads, rank), (batch, queries, heads, rope), (batch, keys, rank), (batch, keys, rope)
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def naive(operands: tuple[Tensor, ...], case: Case) -> tuple[Tensor, Tensor]:
    q_latent, q_rope, latent, k_rope = operands
    same = torch.eye(latent.shape[2], dtype=latent.dtype).expand(q_latent.shape[2], -1, -1)
    return equation((torch.cat([q_latent, q_rope], dim=-1), latent, k_rope, same, same), case, SCALE)


def op(operands: tuple[Tensor, ...], case: Case) -> tuple[Tensor, Tensor]:
    return latent_attention(*operands, *case, SCALE)


def gradients(function, operands, case, direction):
    """The gradients of the operands, for given gradients (`direction`) of o and, where it is finite, of lse."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in operands]
        o, lse = function(leaves, case)
        total = (o * direction[0].to(o.dtype)).sum()
        if direction[1] is not None:
            total = total + (lse.masked_fill(lse == -torch.inf, 0) * direction[1].to(lse.dtype)).sum()
        return torch.autograd.grad(total, leaves)


def assert_right(operands, case, *, with_lse=False):
    """Check every gradient against float64; autograd of the equation in the inputs' dtype is the measure of error."""
    shape = operands[0].shape
    direction = torch.randn(shape, dtype=torch.float64), torch.randn(shape[:3]) if with_lse else None
    exact = gradients(naive, [t.double() for t in operands], case, direction)
    measure = gradients(naive, operands, case, direction)
    for plain, ours, truth in zip(measure, gradients(op, operands, case, direction), exact, strict=True):
        assert truth.isfinite().all()
        if truth.numel():
            assert_as_close_as(plain, ours, truth, merges=32)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_float32(sizes, mask):
    assert_right(make(sizes), case_of(sizes, mask))


@pytest.mark.parametrize("mask", [name for name in MASKS if name != "bias of finfo.min"])
def test_of_the_log_sum_exp(mask):
    assert_right(make(SIZES["after a context"]), masks(2, 3, 13, 31)[mask], with_lse=True)


@pytest.mark.parametrize("mask", ["none", "causal", "left padding and causal", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(mask, dtype):
    assert_right(make((2, 23, 31, 5, 12, 4), dtype), masks(2, 5, 23, 31)[mask])


@pytest.mark.parametrize("mask", ["none", "causal", "causal, first queries see nothing", "scattered keys", "bias"])
def test_gradcheck(mask):
    bias, offset = masks(2, 2, 3, 4)[mask]
    case = (bias.double() if bias is not None and bias.is_floating_point() else bias, offset)
    operands = [t.requires_grad_() for t in make((2, 3, 4, 2, 3, 2), torch.float64)]
    with torch.enable_grad():
        assert torch.autograd.gradcheck(lambda *given: op(given, case)[0], operands)


@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (1, 1, 7, 9), (2, 1, 1, 9)], ids=str)
def test_a_bias_that_learns(shape):
    operands, found = make((2, 7, 9, 3, 8, 2)), []
    values, direction = torch.randn(shape), torch.randn(2, 7, 3, 8)
    for function, dtype in ((naive, torch.float64), (naive, torch.float32), (op, torch.float32)):
        bias = values.to(dtype).requires_grad_()
        with torch.enable_grad():
            o, _ = function([t.to(dtype) for t in operands], (bias, 2))
            found += torch.autograd.grad((o * direction.to(dtype)).sum(), bias)
    exact, measure, actual = found
    assert_as_close_as(measure, actual, exact, merges=32)


@pytest.mark.parametrize("wanted", range(1, 16))
def test_only_what_is_wanted_is_computed(wanted):
    operands = make((2, 5, 9, 3, 8, 2))
    flags = [bool(wanted >> i & 1) for i in range(4)]
    o, lse = op(operands, (None, 4))
    arguments = torch.randn_like(o), None, *operands, None, 4, SCALE, o, lse
    every = latent_attention_backward(*arguments, [True] * 4 + [False])
    some = latent_attention_backward(*arguments, [*flags, False])
    for actual, expected in zip(some, [g for g, flag in zip(every, flags, strict=True) if flag], strict=True):
        assert torch.equal(actual, expected)


def test_frozen_latents_ask_for_no_gradient():
    asked = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is latent_attention_backward.default:
                asked.append(list(args[-1]))
            return func(*args, **(kwargs or {}))

    q_latent, *others = make((1, 5, 5, 3, 8, 2))
    with torch.enable_grad(), Calls():
        op((q_latent.requires_grad_(), *others), (None, 0))[0].sum().backward()
    assert asked == [[True, False, False, False, False]]


def test_memory_is_bounded():
    """The workspace has room for 8 heads' keys, whose scores may not all be there at once."""
    heads, tokens, width = 64, 512, 24
    operands = make((1, tokens, tokens, heads, 16, 8))
    o, lse = op(operands, (None, 0))
    arguments = torch.ones_like(o), None, *operands, None, 0, SCALE, o, lse, [True] * 4 + [False]
    taken = peak(lambda: latent_attention_backward(*arguments))
    queries = tokens * heads * width * 4  # both parts joined, the gradient, and its two parts
    latents = tokens * width * 4
    scores_of_a_head = tokens * tokens * 4
    assert taken <= 3 * queries + latents + scores_of_a_head


@pytest.mark.parametrize("case", [(None, None), (None, 2), (torch.rand(1, 1, 3, 5) < 0.5, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype, case):
    operands = make((2, 3, 5, 4, 24, 8), dtype)
    o, lse = op(operands, case)
    torch.library.opcheck(
        latent_attention_backward.default,
        (torch.randn_like(o), None, *operands, *case, SCALE, o, lse, [True] * 4 + [False]),
    )


def test_refuses_another_shape():
    operands = make((1, 5, 5, 3, 8, 2))
    o, lse = op(operands, (None, 0))
    with pytest.raises(KernelError, match=r"expected grad_o of shape \[B, Sq, N, L\] = \[1, 5, 3, 8\], found"):
        latent_attention_backward(o[:, 1:], None, *operands, None, 0, SCALE, o, lse, [True] * 4 + [False])


def test_a_gradient_of_a_gradient_is_refused():
    q_latent, *others = make((1, 5, 5, 3, 8, 2))
    q_latent.requires_grad_()
    with torch.enable_grad():
        o, _ = op((q_latent, *others), (None, 0))
        (first,) = torch.autograd.grad(o.square().sum(), q_latent, create_graph=True)
        with pytest.raises(NotImplementedError, match="mla::latent_attention_backward has no backward"):
            first.sum().backward()
