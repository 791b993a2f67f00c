"""Graphs that need gradients: rewritten before they are differentiated, and right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mla_compile
from mla_compile.bench.memory import kept_for_backward
from mla_compile.training.capture import NotCaptured
from tests.compile.layers import (
    ByHand,
    DetachedKeys,
    Layer,
    assert_trained,
    expanded_attention,
    hidden,
)
from tests.models import HIDDEN, L, N, P, R, V, rope
from tests.training import Rewritten, assert_gradients_of, gradients


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float64], ids=str
)
def test_a_layer_is_trained(dtype):
    torch.manual_seed(0)
    compiled = assert_trained(Layer().to(dtype), hidden(dtype), rewritten=1)
    (outcome,) = compiled.outcomes
    assert (outcome.path, outcome.mask) == ("chunked", "causal")
    assert outcome.reason == "keys and values are up-projected again for gradients"


def test_under_autocast():
    compiled = assert_trained(Layer(), hidden(), rewritten=1, autocast=True)
    (op,) = compiled.nodes(expanded_attention)
    assert {operand.meta["example_value"].dtype for operand in op.all_input_nodes} == {torch.bfloat16}


class Autocast(Layer):
    """Turns autocast on for its attention alone."""

    def attend(self, q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().attend(q, k, v).to(q.dtype)


def test_an_autocast_that_the_graph_turns_on():
    assert_trained(Autocast(), hidden(), rewritten=1)


def test_a_softmax_by_hand():
    assert_trained(ByHand(), hidden(), rewritten=1)


class GivenATuple(Layer):
    """The sizes to which the attention's result is reshaped are one argument, in which some are symbols."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = super().attend(q, k, v).permute(0, 2, 1, 3)
        return o.reshape((o.shape[0], o.shape[1], N * V)).unflatten(2, (N, V)).transpose(1, 2)


@pytest.mark.usefixtures("without_codegen")
def test_sizes_in_a_tuple():
    module, x = GivenATuple(), hidden()
    torch._dynamo.reset()
    assert_gradients_of(torch.compile(module, backend="mla", dynamic=True, options={"mla.strict": True}), module, [x])
    assert [site.path for site in mla_compile.last_report().sites] == ["chunked"]


class Shifted(ByHand):
    """The detached maximum of a row is subtracted from its scores, so that the exponential does not overflow."""

    def greatest(self, scores):
        return scores.max(-1, keepdim=True)[0].detach()

    def attend(self, q, k, v):
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(mask, float("-inf"))
        powers = (scores - self.greatest(scores)).exp()
        return powers / powers.sum(-1, keepdim=True) @ v


class ShiftedWithoutGradients(Shifted):
    def greatest(self, scores):
        with torch.no_grad():
            return scores.amax(-1, keepdim=True)


@pytest.mark.parametrize("layer", [Shifted, ShiftedWithoutGradients])
def test_what_a_softmax_does_not_see_needs_no_gradients(layer):
    assert_trained(layer(), hidden(), rewritten=1)


class Biased(Layer):
    """Keys and values have biases. Those of the keys do not change a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.of_keys, self.of_values = (nn.Parameter(torch.randn(N, 1, width)) for width in (P, V))
        self.unused = nn.Parameter(torch.ones(3))

    def up_projected(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().up_projected(latent)
        return k + self.of_keys, v + self.of_values


def test_what_a_softmax_does_not_see_has_a_gradient_of_zero():
    """Rather than None: optimizers skip parameters without gradients, and other ranks wait for these gradients."""
    torch.manual_seed(0)
    module = Biased()
    assert_trained(module, hidden(), rewritten=1)
    with torch.enable_grad():
        Rewritten(module)(hidden()).sum().backward()
    assert {name for name, parameter in module.named_parameters() if parameter.grad is None} == {"unused"}
    assert module.of_keys.grad.count_nonzero() == 0
    assert module.of_values.grad.count_nonzero() > 0


def test_no_gradient_of_zero_is_made_for_a_frozen_bias():
    torch.manual_seed(0)
    module = Biased()
    module.of_keys.requires_grad_(False)
    compiled = assert_trained(module, hidden(), rewritten=1)
    assert not [node for node in compiled.graphs[0].graph.nodes if node.target == "narrow"]


class LikeAnother(Layer):
    """Rope keys are given the dtype of the projection that they come from, as transformers does."""

    def latents(self, x):
        latent, k_rope = super().latents(x)
        return latent, rope(k_rope[:, :, None].float(), 0)[:, :, 0].type_as(k_rope).expand_as(k_rope)


def test_no_gradient_of_zero_is_made_for_what_only_gives_a_dtype_or_sizes():
    compiled = assert_trained(LikeAnother(), hidden(), rewritten=1)
    assert not [node for node in compiled.graphs[0].graph.nodes if node.target == "narrow"]


class DetachedLatent(Layer):
    """The latent is detached: its up-projection learns, what it is made of does not."""

    def latents(self, x):
        latent, k_rope = super().latents(x)
        return latent.detach(), k_rope


def test_a_latent_that_is_detached():
    assert_trained(DetachedLatent(), hidden(), rewritten=1)


class Frozen(Layer):
    """Attention without gradients, as of a frozen encoder, and then with gradients."""

    def forward(self, x):
        with torch.no_grad():
            x = super().forward(x)
        return x + super().forward(x)


def test_attention_without_gradients_in_a_graph_with_some():
    assert_trained(Frozen(), hidden(), rewritten=2, outcomes=2)


class LoRA(nn.Module):
    """Low-rank additions to a frozen projection, as peft writes them."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 2.0


@pytest.mark.parametrize("name", ["q_proj", "kv_a_proj", "o_proj"])
def test_low_rank_additions(name):
    module = Layer().requires_grad_(False)
    setattr(module.mla, name, LoRA(getattr(module.mla, name)))
    assert_trained(module, hidden(), rewritten=1)


def test_only_what_learns_has_a_gradient_computed():
    module = Layer().requires_grad_(False)
    module.mla.q_proj.weight.requires_grad_(True)
    asked = []
    op = torch.ops.mla.expanded_attention_backward.default

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is op:
                asked.append(args[-1])
            return func(*args, **(kwargs or {}))

    compiled = Rewritten(module)
    with torch.enable_grad():
        output = compiled(hidden())
        with Calls():
            output.sum().backward()
    assert asked == [[True, False, False, False, False, False]]


class Checkpointed(Layer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_a_checkpoint():
    assert_trained(Checkpointed(), hidden(), rewritten=1)


class Twice(nn.Module):
    """Three layers and a residual stream: a plain layer, a checkpointed one, and one with detached keys."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Layer(), Checkpointed(), DetachedKeys()

    def forward(self, x):
        x = x + self.first(x)
        x = x + self.second(x)
        return x + self.third(x)


def test_each_attention_for_itself():
    compiled = assert_trained(Twice(), hidden(), rewritten=2, outcomes=3)
    assert [outcome.rewritten for outcome in compiled.outcomes] == [True, False, True]


class Viewed(Layer):
    """Views the output as only the strides of the original attention allow."""

    def attend(self, q, k, v):
        o = super().attend(q, k, v)
        return o.view(o.shape[0] * N, *o.shape[2:]).view(o.shape)


def test_strides_are_those_of_the_original():
    assert_trained(Viewed(), hidden(), rewritten=1)


def test_an_input_that_is_a_view_of_one_that_is_written_to():
    def step(base, view):
        base.mul_(2)
        return module(view)

    module, x = Layer(), torch.randn(3, 13, HIDDEN)
    compiled = Rewritten(step)
    with torch.enable_grad():
        y = x.clone()
        output = compiled(y, y[:2])
    torch.testing.assert_close(output, module(2 * x[:2]))
    assert compiled.notes == ["expected no writes to inputs that share memory with other inputs, found one"]


@pytest.mark.usefixtures("without_codegen")
def test_keys_and_values_are_not_kept_for_the_backward():
    """The bound, for each token: queries, outputs with their log-sum-exp, latents and rope keys four times, and
    N (P + V) numbers for all else."""
    module, tokens = Layer(), 64
    compiled = torch.compile(module, backend="mla", dynamic=False)
    x = hidden(tokens=tokens).requires_grad_()
    kept = kept_for_backward(lambda: compiled(x).sum(), (x, *module.parameters())) / (2 * tokens * 4)
    assert 0 < kept < N * (P + V) + N * (P + R) + N * (V + 1) + 4 * (L + R)
    assert mla_compile.last_report().rewritten == 1


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_through_torch_compile(dynamic):
    module = Layer()
    compiled = torch.compile(module, backend="mla", dynamic=dynamic)
    for tokens in (13, 29):
        x = hidden(tokens=tokens)
        assert_gradients_of(compiled, module, [x])
        assert mla_compile.last_report().rewritten == 1


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("cut", [True, False])
def test_options_in_training(cut):
    module = Layer() if not cut else DetachedKeys()
    compiled = torch.compile(module, backend="mla", options={"mla.strict": True, "mla.verify": True})
    if cut:
        with pytest.raises(Exception, match="StrictError"):
            gradients(compiled, module, [hidden()])
    else:
        gradients(compiled, module, [hidden()])


@pytest.mark.usefixtures("without_codegen")
def test_naive_attention_is_not_trained_absorbed():
    """No such path takes it, so asking for that changes nothing."""
    module = Layer()
    gradients(torch.compile(module, backend="mla", options={"mla.path": "absorbed"}), module, [hidden()])
    assert [site.path for site in mla_compile.last_report().sites] == ["chunked"]


@pytest.mark.parametrize("option", [{"mla.path": "off"}, {}], ids=["off", "not captured"])
def test_strict_says_that_nothing_was_looked_at(option, monkeypatch):
    if not option:
        monkeypatch.setattr("mla_compile.training.rewrite.capture", refuse_to_capture)
    module = Layer()
    compiled = torch.compile(module, backend="mla", options={"mla.strict": True, **option})
    with pytest.raises(Exception, match="expected a graph to rewrite, found one to leave"):
        gradients(compiled, module, [hidden()])


def refuse_to_capture(_):
    raise NotCaptured("an example")


@pytest.mark.usefixtures("without_codegen", "wrong_rewriter")
def test_verify_raises_on_a_wrong_rewrite_in_training():
    module = Layer()
    compiled = torch.compile(module, backend="mla", options={"mla.verify": True})
    for _ in range(2):
        with pytest.raises(mla_compile.VerifyError, match="the chunked path differs from the original by"):
            gradients(compiled, module, [hidden()])


@pytest.mark.usefixtures("without_codegen")
def test_verify_looks_into_checkpoints(monkeypatch):
    checked = []
    monkeypatch.setattr("mla_compile.verify.compare", lambda original, rewritten, site, _: checked.append(site.path))
    module = Twice()
    compiled = torch.compile(module, backend="mla", options={"mla.verify": True})
    for _ in range(2):
        gradients(compiled, module, [hidden()])
        assert checked == ["chunked"] * 2


@pytest.mark.usefixtures("without_codegen", "wrong_rewriter")
def test_verify_raises_on_a_wrong_rewrite_in_a_checkpoint():
    module = Checkpointed()
    compiled = torch.compile(module, backend="mla", options={"mla.verify": True})
    with pytest.raises(mla_compile.VerifyError, match="the chunked path differs from the original by"):
        gradients(compiled, module, [hidden()])


class CalledTwice(Layer):
    """Two calls with one input; the first one perhaps without gradients, as that of a teacher."""

    def forward(self, x):
        with torch.set_grad_enabled(not self.teacher):
            first = super().forward(x)
        return super().forward(x) + first.square()


@pytest.mark.parametrize("teacher", [False, True])
def test_one_layer_twice(teacher):
    assert_trained(CalledTwice(teacher=teacher), hidden(), rewritten=2, outcomes=2)


@pytest.mark.usefixtures("without_codegen")
def test_a_length_that_only_a_run_knows():
    module, x = Layer(), hidden()
    torch._dynamo.decorators.mark_unbacked(x, 1)
    with torch.enable_grad():
        torch.compile(module, backend="mla", fullgraph=True)(x).square().mean().backward()
        found = [parameter.grad for parameter in module.parameters()]
        expected = torch.autograd.grad(module(x).square().mean(), list(module.parameters()))
    assert mla_compile.last_report().rewritten == 1
    torch.testing.assert_close(found, list(expected))
