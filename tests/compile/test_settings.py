"""Settings that users combine with the backend: attention is rewritten, and each works as in stock Inductor."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch._inductor import compile_fx as inductor
from torch._inductor import config, decomposition
from torch._inductor.custom_graph_pass import CustomGraphPass

import mla_compile
from tests.models import HIDDEN, Combined, L, R


def decode_inputs():
    return torch.randn(2, 1, HIDDEN), (torch.randn(2, 20, L), torch.randn(2, 20, R))


@pytest.fixture
def seen(monkeypatch):
    """The settings in force when Inductor's passes ran."""
    found = {}

    def spy(name, passes, *arguments):
        found.setdefault(name, []).append(config.get_config_copy())
        return passes(*arguments)

    for name in ("pre_grad_passes", "joint_graph_passes", "post_grad_passes"):
        monkeypatch.setattr(inductor, name, functools.partial(spy, name, getattr(inductor, name)))
    return found


@pytest.mark.usefixtures("without_codegen")
def test_inductors_passes_before_its_code_run_once_under_the_settings_given(seen):
    options = {"size_asserts": False, "pre_grad_fusion_options": {"batch_linear": {}}}
    torch.compile(Combined(), backend="mla", options=options)(*decode_inputs())
    assert mla_compile.last_report().rewritten == 1
    assert {name: len(runs) for name, runs in seen.items()} == {"pre_grad_passes": 1, "joint_graph_passes": 1}
    for (run,) in seen.values():
        assert {name: run[name] for name in options} == options
        assert run["pattern_matcher"]


@pytest.mark.slow
def test_all_passes_of_inductors_run_once_under_the_settings_given(seen):
    options = {"implicit_fallbacks": False, "size_asserts": False}
    module, inputs = Combined(), decode_inputs()
    compiled = torch.compile(module, backend="mla", options=options)
    torch.testing.assert_close(compiled(*inputs)[0], module(*inputs)[0])
    assert mla_compile.last_report().rewritten == 1
    assert {name: len(runs) for name, runs in seen.items()} == dict.fromkeys(seen, 1)
    assert len(seen) == 3
    for (run,) in seen.values():
        assert {name: run[name] for name in options} == options
        assert run["pattern_matcher"]


@pytest.mark.parametrize("path", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_a_backward_that_is_compiled_later_has_the_options_of_its_forward(seen, path):
    module = Combined()
    compiled = torch.compile(module, backend="mla", options={"size_asserts": False, "mla.path": path})
    with torch.enable_grad():
        compiled(*decode_inputs())[0].sum().backward()
    assert mla_compile.last_report().rewritten == (path == "auto")
    assert [run["size_asserts"] for run in seen["post_grad_passes"]] == [False, False]


class Watcher(CustomGraphPass):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append(" ".join(str(node.target) for node in graph.nodes))

    def uuid(self) -> None:
        return None


@pytest.mark.diagonal
@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(
    ("setting", "sees"),
    [
        ("pre_grad_custom_pass", "function scaled_dot_product_attention"),
        ("joint_custom_pre_pass", "mla.latent_attention.default"),
        ("joint_custom_post_pass", "mla.latent_attention.default"),
    ],
)
@pytest.mark.parametrize("as_option", [True, False], ids=["option", "global"])
def test_a_users_own_pass_runs_once(setting, sees, as_option):
    module, watcher = Combined(), Watcher()
    options = {setting: watcher}
    with config.patch({} if as_option else options):
        torch.compile(module, backend="mla", options=options if as_option else None)(*decode_inputs())
    assert mla_compile.last_report().rewritten == 1
    (seen,) = watcher.seen
    assert sees in seen


@torch.library.custom_op("mla_tests::linear", mutates_args=())
def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A user's own kernel."""
    return x @ weight.T


@linear.register_fake
def _(x, weight):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class OfAUsers(nn.Module):
    def __init__(self, projection):
        super().__init__()
        self.weight = projection.weight

    def forward(self, x):
        return linear(x, self.weight)


@pytest.mark.usefixtures("without_codegen")
def test_an_op_that_a_user_gave_a_decomposition_is_seen_through(monkeypatch):
    known = decomposition.select_decomp_table() | {
        torch.ops.mla_tests.linear.default: lambda x, weight: x @ weight.permute(1, 0)
    }
    for module in ("mla_compile.attempt", "mla_compile.inductor.retrace", "torch._inductor.compile_fx"):
        monkeypatch.setattr(f"{module}.select_decomp_table", lambda: known)
    module, inputs = Combined(), decode_inputs()
    expected = module(*inputs)[0]
    module.kv_b_proj = OfAUsers(module.kv_b_proj)
    torch.testing.assert_close(torch.compile(module, backend="mla")(*inputs)[0], expected)
    assert [site.path for site in mla_compile.last_report().sites] == ["absorbed"]


class Layers(nn.Module):
    """Two layers, each in a nested compile region."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Combined(), Combined()])

    @torch.compiler.nested_compile_region
    def layer(self, of, x, latent, k_rope):
        return x + of(x, (latent, k_rope))[0]

    def forward(self, x, cache):
        for layer in self.layers:
            x = self.layer(layer, x, *cache)
        return x


@pytest.mark.usefixtures("without_codegen")
def test_attention_in_nested_regions_is_rewritten():
    module, inputs = Layers(), decode_inputs()
    torch.testing.assert_close(torch.compile(module, backend="mla")(*inputs), module(*inputs))
    assert [site.path for site in mla_compile.last_report().sites] == ["absorbed", "absorbed"]


@pytest.mark.usefixtures("without_codegen")
def test_compiled_autograd():
    module, inputs = Combined(), decode_inputs()
    weight = module.kv_b_proj.weight

    def step():
        module(*inputs)[0].square().sum().backward()
        return weight.grad

    with torch.enable_grad(), torch._dynamo.config.patch(compiled_autograd=True):
        expected, weight.grad = step(), None
        torch.testing.assert_close(torch.compile(step, backend="mla")(), expected)
    assert any(report.rewritten == 1 for report in mla_compile.reports())
