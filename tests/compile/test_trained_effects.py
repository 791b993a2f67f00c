"""Training where operations have effects beside their results: they raise for some matrices, print, or count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.effects import _get_effect
from torch._library.effects import EffectType

import mla_compile
from tests.compile.layers import Layer, assert_trained, hidden, stock
from tests.models import HIDDEN, L, N, P, R, V

CALLS: list[int] = []


@torch.library.custom_op("effects::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    """The identity, which counts how often it is called."""
    CALLS.append(x.numel())
    return x.clone()


counted.register_fake(torch.empty_like)
counted.register_autograd(lambda _, grad: grad)
torch.library._register_effectful_op("effects::counted", EffectType.ORDERED)
torch.library.define("effects::attend", "(Tensor q, Tensor k, Tensor v, Tensor matrix) -> Tensor")


@torch.library.impl("effects::attend", "CompositeImplicitAutograd")
def _attend(q: Tensor, k: Tensor, v: Tensor, matrix: Tensor) -> Tensor:
    """Attention which also counts."""
    counted(matrix)
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


class WithMatrix(Layer):
    """A matrix beside the weights of attention, which `torch.linalg` is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(self.width) + torch.randn(self.width, self.width) / self.width)

    width = L


class Rotated(WithMatrix):
    """Up-projections of a latent that is rotated by Cayley's map of a matrix, as in orthogonal adapters."""

    def up_projected(self, latent):
        skew, one = self.matrix - self.matrix.T, torch.eye(L, dtype=latent.dtype)
        rotation = torch.linalg.solve(one + skew, one - skew)
        kv = nn.functional.linear(latent, self.mla.kv_b_proj.weight @ rotation)
        return kv.unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)


class Inverted(WithMatrix):
    """Up-projections by an inverse."""

    def up_projected(self, latent):
        kv = nn.functional.linear(latent, self.mla.kv_b_proj.weight @ torch.linalg.inv(self.matrix))
        return kv.unflatten(2, (N, P + V)).transpose(1, 2).split([P, V], dim=-1)


class Whitened(WithMatrix):
    """A latent whose columns are mixed by the Cholesky factor of a matrix."""

    def latents(self, x):
        latent, k_rope = super().latents(x)
        return latent @ torch.linalg.cholesky(self.matrix @ self.matrix.T), k_rope


class Apart(WithMatrix):
    """An inverse that has nothing to do with the attention."""

    width = HIDDEN

    def forward(self, x):
        return super().forward(x) @ torch.linalg.inv(self.matrix)


class Cancelled(WithMatrix):
    """A bias of all keys, which the softmax cancels: nothing reads it once the attention is rewritten."""

    width = P

    def up_projected(self, latent):
        k, v = super().up_projected(latent)
        return k + torch.linalg.inv(self.matrix)[0], v


class Printing(Layer):
    def up_projected(self, latent):
        k, v = super().up_projected(latent)
        torch._higher_order_ops.print("{} keys", k.shape[2])
        return k, v


class CountedKeys(Layer):
    """An operation that the passes do not know, between the up-projection and the attention."""

    def up_projected(self, latent):
        k, v = super().up_projected(latent)
        return counted(k), v


class CountedLatent(Layer):
    def latents(self, x):
        latent, k_rope = super().latents(x)
        return counted(latent), k_rope


class CountedKeysOfWeights(Layer):
    """Rope keys are counted on their way from the latent, and weights of the attention returned."""

    def latents(self, x):
        latent, _ = super().latents(x)
        return latent, counted(latent[..., :R] * 2)

    def attend(self, q, k, v):
        self.weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return self.weights @ v

    def forward(self, x):
        return super().forward(x), self.weights


class InOneOp(WithMatrix):
    """The attention and the effect are one operation of Dynamo's graph."""

    def attend(self, q, k, v):
        return torch.ops.effects.attend(q, k, v, self.matrix)


class Stepping:
    """A compiled module whose calls are steps of training."""

    def __init__(self, module: nn.Module, backend="mla") -> None:
        torch._dynamo.reset()
        self._compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)

    def __call__(self) -> None:
        with torch.enable_grad():
            result = self._compiled(hidden())
            (result[0] if isinstance(result, tuple) else result).sum().backward()


@pytest.mark.parametrize("layer", [Rotated, Inverted, Whitened, Apart, Cancelled, Printing, CountedLatent])
def test_operations_with_effects_do_not_keep_attention_from_being_rewritten(layer):
    assert not assert_trained(layer(), hidden(), rewritten=1).notes


@pytest.mark.skipif(
    _get_effect("aten::_linalg_check_errors") is None, reason="this torch drops the errors of matrices it has compiled"
)
@pytest.mark.parametrize("backend", ["mla", stock], ids=["mla", "stock"])
@pytest.mark.parametrize("layer", [Inverted, Whitened, Apart, Cancelled])
@pytest.mark.usefixtures("without_codegen")
def test_a_matrix_that_is_singular_still_raises(layer, backend):
    module = layer()
    step = Stepping(module, backend)
    step()
    if backend == "mla":
        assert mla_compile.last_report().rewritten == 1
    with torch.no_grad():
        module.matrix.zero_()
    with pytest.raises(torch.linalg.LinAlgError):
        step()


@pytest.mark.usefixtures("without_codegen")
def test_each_call_prints_once(capfd):
    step = Stepping(Printing())
    step()
    step()
    assert mla_compile.last_report().rewritten == 1
    assert capfd.readouterr().out.count("13 keys") == 2


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("layer", [CountedLatent, CountedKeysOfWeights])
def test_what_is_recomputed_for_gradients_has_its_effects_once(layer):
    step = Stepping(layer())
    CALLS.clear()
    step()
    step()
    assert mla_compile.last_report().rewritten == 1
    assert len(CALLS) == 2


def test_an_effect_between_the_up_projection_and_the_attention_keeps_both():
    found = assert_trained(CountedKeys(), hidden(), rewritten=0)
    assert "expected keys of which some columns are an up-projection" in found.outcomes[0].reason


def test_attention_that_is_one_operation_with_an_effect_stays():
    found = assert_trained(InOneOp(), hidden(), rewritten=0)
    assert found.outcomes[0].reason.startswith("expected an attention by an operation without effects of its own")
    assert found.nodes(torch.ops.effects.attend)
