"""Low-rank adapters beside projections: attention is rewritten, and stays right as they are switched or merged."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import mla_compile
from tests.adapters import Adapted, WithMagnitudes, adapt
from tests.compile.layers import Layer, assert_trained, hidden
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, Combined
from tests.training import Rewritten, assert_gradients_close, gradients

STEPS = (6, 1)
ALL = ("q_proj", "kv_a_proj", "kv_b_proj", "o_proj")
KINDS = [Adapted, WithMagnitudes]
EACH_CALL = pytest.mark.parametrize(
    "calls",
    [pytest.param(STEPS[:1], id="prefill"), pytest.param(STEPS, id="prefill and decode", marks=pytest.mark.slow)],
)


def run(module, owner: nn.Module, dtype: torch.dtype, calls: tuple[int, ...] = STEPS) -> list[Tensor]:
    """The outputs of successive calls with so many tokens each."""
    generator = torch.Generator().manual_seed(1)
    cache, outputs = owner.empty_cache(2, dtype), []
    for steps in calls:
        x = torch.randn(2, steps, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
        output, cache = module(x, cache)
        outputs.append(output)
    return outputs


def assert_right(
    module: nn.Module,
    compiled,
    dtype: torch.dtype = torch.float32,
    paths: tuple[str, ...] = ("absorbed", "chunked"),
    calls: tuple[int, ...] = STEPS,
) -> None:
    """Check a compiled module against eager and float64, and that every attention takes one of `paths`."""
    before = len(mla_compile.reports())
    wide = copy.deepcopy(module).double()
    exact, eager = run(wide, wide, torch.float64, calls), run(module, module, dtype, calls)
    for ours, plain, truth in zip(run(compiled, module, dtype, calls), eager, exact, strict=True):
        assert_as_close_as_eager(ours, plain, truth)
    for report in mla_compile.reports()[before:]:
        assert [site.path for site in report.sites] in [[path] for path in paths], report


@pytest.mark.diagonal
@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("path", ["absorbed", "chunked"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_beside_every_projection(dtype, kind, path):
    module = Combined().to(dtype)
    adapt(module, *ALL, kind=kind)
    compiled = torch.compile(module, backend="mla", options={"mla.path": path})
    assert_right(module.to(dtype), compiled, dtype)
    assert mla_compile.reports()


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.slow
@pytest.mark.parametrize("path", ["absorbed", "chunked"])
def test_adapters_in_float32_beside_a_weight_in_bfloat16(path):
    module = Combined().bfloat16()
    adapt(module, "kv_b_proj")
    assert {weight.dtype for weight in module.kv_b_proj.lora_A.parameters()} == {torch.float32}
    assert_right(module, torch.compile(module, backend="mla", options={"mla.path": path}), torch.bfloat16)


@pytest.mark.slow
def test_with_generated_code():
    module = Combined()
    adapt(module, "kv_b_proj")
    assert_right(module, torch.compile(module, backend="mla"))


@pytest.mark.usefixtures("without_codegen")
@EACH_CALL
@pytest.mark.filterwarnings("ignore:variant 8 of forward of Combined")  # the states of the adapters take all 8
@pytest.mark.parametrize("kind", [Adapted, pytest.param(WithMagnitudes, marks=pytest.mark.slow)])
def test_an_adapter_is_switched_while_the_model_is_compiled(kind, calls):
    module = Combined()
    adapter = adapt(module, "kv_b_proj", kind=kind, names=("one", "other"))["kv_b_proj"]
    compiled, found = torch.compile(module, backend="mla"), []

    def look() -> None:
        assert_right(module, compiled, calls=calls)
        found.append(run(compiled, module, torch.float32, calls)[-1])

    look()
    adapter.off = True
    look()
    adapter.off = False
    adapter.active = ["other"]
    look()
    adapter.active = ["one", "other"]
    look()
    with torch.no_grad():  # other numbers in place, as an optimizer or a loader of adapters writes them
        adapter.lora_B["one"].weight.mul_(-3.0)
    look()
    adapter.active = ["one"]
    look()
    assert all(not torch.allclose(a, b, rtol=1e-3) for i, a in enumerate(found) for b in found[:i])


@pytest.mark.usefixtures("without_codegen")
@EACH_CALL
def test_an_adapter_is_merged_while_the_model_is_compiled(calls):
    module = Combined()
    adapter = adapt(module, "kv_b_proj")["kv_b_proj"]
    compiled = torch.compile(module, backend="mla")
    assert_right(module, compiled, calls=calls)
    apart = run(compiled, module, torch.float32, calls)
    adapter.merge()
    assert_right(module, compiled, calls=calls)
    torch.testing.assert_close(run(compiled, module, torch.float32, calls), apart, rtol=1e-4, atol=1e-5)
    adapter.unmerge()
    assert_right(module, compiled, calls=calls)


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("projections", [("kv_b_proj",), ALL], ids=["kv_b_proj", "all"])
def test_adapters_are_trained(projections, frozen, kind):
    module = Layer().requires_grad_(not frozen)
    adapt(module.mla, *projections, kind=kind, frozen=frozen)
    assert_trained(module, hidden(), rewritten=1)


def test_several_adapters_are_trained():
    module = Layer().requires_grad_(False)
    adapter = adapt(module.mla, "kv_b_proj", names=("one", "other", "third"))["kv_b_proj"]
    adapter.active = ["one", "other", "third"]
    assert_trained(module, hidden(), rewritten=1)


def test_adapters_are_trained_in_autocast():
    module = Layer().requires_grad_(False)
    adapt(module.mla, *ALL)
    assert_trained(module, hidden(), rewritten=1, autocast=True)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_that_is_off_changes_nothing(kind):
    module = Layer().requires_grad_(False)
    adapt(module.mla, *ALL, dropout=0.3, kind=kind)
    assert_trained(module.eval(), hidden(), rewritten=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [True, False])
def test_dropout_before_an_adapter_of_the_up_projection(kind, frozen):
    """What the adapter makes of its own latent is one beside the latent. From one seed, dropout is eager's."""
    module = Layer().requires_grad_(not frozen)
    adapt(module.mla, "kv_b_proj", dropout=0.5, kind=kind, frozen=frozen)
    wide = copy.deepcopy(module.train()).double()
    compiled, found = Rewritten(module), []
    for function, owner, x in (
        (compiled, module, hidden()),
        (module, module, hidden()),
        (wide, wide, hidden().double()),
    ):
        torch.manual_seed(5)
        found.append(gradients(function, owner, [x]))
    assert [outcome.path for outcome in compiled.outcomes] == ["chunked"]
    assert_gradients_close(*found)


def test_dropout_before_other_projections():
    module = Layer().requires_grad_(False)
    adapt(module.mla, "q_proj", "kv_a_proj", "o_proj", dropout=0.3)
    compiled = Rewritten(module.train())
    gradients(compiled, module, [hidden()])
    assert [outcome.path for outcome in compiled.outcomes] == ["chunked"]


@pytest.mark.usefixtures("without_codegen")
def test_what_is_frozen_gets_no_gradient():
    module = Layer().requires_grad_(False)
    adapt(module.mla, "kv_b_proj")
    compiled = torch.compile(module, backend="mla")
    with torch.enable_grad():
        compiled(hidden()).square().mean().backward()
    assert mla_compile.last_report().rewritten == 1
    learned = {name for name, weight in module.named_parameters() if weight.grad is not None}
    assert learned == {f"mla.kv_b_proj.lora_{part}.one.weight" for part in "AB"}


class Capped(Layer):
    """Scores under a soft cap."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (3 * (q @ k.mT / 9).tanh()).softmax(-1) @ v


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("path", ["absorbed", "chunked"])
def test_a_function_of_the_scores_in_bfloat16(path: str) -> None:
    """The weight that has an adapter beside it is summed up in float32, and the latent is not."""
    layer = Capped().bfloat16()
    adapt(layer.mla, "kv_b_proj")
    layer.bfloat16()
    compiled, x = torch.compile(layer, backend="mla", options={"mla.path": path}), hidden(torch.bfloat16)
    with torch.no_grad():
        assert_as_close_as_eager(compiled(x), layer(x), copy.deepcopy(layer).double()(x.double()))
    assert [site.path for site in mla_compile.last_report().sites] == [path]
