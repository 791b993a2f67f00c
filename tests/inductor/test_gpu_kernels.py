"""What a report says of the kernels that a graph would run, and the option `mla.kernels`."""

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytest.importorskip("triton")

import mla_compile
from mla_compile.asked import asked as asked_for
from mla_compile.inductor import codegen, gpu_kernels
from mla_compile.kernels._common.machine import Machine
from mla_compile.kernels.implementations import expansions
from mla_compile.report import Report, merged
from tests.kernels.implementations.conftest import install
from tests.kernels.recorded import made as without_values

__all__ = ["install"]

OP = "mla::paged_latent_attention"
REST = (
    "FlashAttention 3 is not installed; FlashInfer's trtllm-gen is not installed; "
    "Gluon in clusters has not run on a GPU yet: mla.kernels='gluon' enables it; Gluon is not installed; "
    "Gluon in tensor memory has not run on a GPU yet: mla.kernels='gluon' enables it"
)


@pytest.fixture(autouse=True)
def h100(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "present", lambda device: Machine("sm_90", 132))


def graph(device="cuda", queries=1, page_size=64):
    """Two layers with pages of their own, as a graph of fake tensors."""
    mode, made = FakeTensorMode(shape_env=ShapeEnv()), fx.Graph()

    def node(value, target=None, *arguments):
        new = made.call_function(target, arguments) if target else made.placeholder(f"x{len(made.nodes)}")
        new.meta["val"] = value
        return new

    def on_device(value):
        return FakeTensor(mode, value, torch.device(device))

    q = [node(on_device(without_values(4, queries, 128, width))) for width in (512, 64)]
    numbers = [node(on_device(without_values(*shape, dtype=torch.int32))) for shape in ((4, 8), (4,))]
    for _ in range(2):
        rows = without_values(40, page_size, 576)
        pool = node(on_device(rows))
        parts = [
            node(on_device(rows[..., start:stop]), torch.ops.aten.slice.Tensor, pool, 2, start, stop)
            for start, stop in ((0, 512), (512, 576))
        ]
        results = on_device(without_values(4, queries, 128, 512)), on_device(without_values(4, queries, 128))
        node(results, torch.ops.mla.paged_latent_attention.default, *q, *parts, *numbers, True, 0.1)
    return made


def test_alike_layers_are_one_sentence(install):
    install("flash_mla_2026")
    assert gpu_kernels.kernels_of(graph(), "auto") == (f"{OP}: FlashMLA; {REST}",)
    assert gpu_kernels.kernels_of(graph(), "triton") == (f"{OP}: triton",)


def test_why_not_another(install):
    install("flash_mla_2026")
    (sentence,) = gpu_kernels.kernels_of(graph(page_size=16), "auto")
    assert sentence == f"{OP}: triton; FlashMLA takes pages of 64 tokens, found 16; {REST}"


def test_nothing_is_said_of_a_graph_on_cpu(install):
    install("flash_mla_2026")
    assert gpu_kernels.kernels_of(graph("cpu"), "auto") == ()


def test_sizes_that_are_symbols_are_left_to_each_call_and_not_guarded(install):
    install("flash_mla_2026")
    made, environment = graph(), ShapeEnv()
    for node in made.find_nodes(op="placeholder"):
        if node.meta["val"].dim() == 4:
            width = node.meta["val"].shape[3]
            with FakeTensorMode(shape_env=environment):
                node.meta["val"] = torch.empty(4, environment.create_unbacked_symint(), 128, width, device="cuda")
    assert gpu_kernels.kernels_of(made, "auto") == (f"{OP}: decided at each call, by its sizes",)
    assert not environment.guards


def test_a_report_says_it_and_keeps_it():
    one, other = Report((), kernels=("a: triton",)), Report((), kernels=("a: triton", "b: FlashMLA"))
    together = merged([one, other])
    assert str(together).splitlines()[-3:] == ["a: triton", "", "b: FlashMLA"]
    assert Report.from_json(together.to_json()) == together


def absorbed(q, latent, k_rope, w):
    """An MLA decode step: q `[1, N, 1, P + R]`."""
    k_nope, v = (latent @ w).view(1, -1, 4, 16).transpose(1, 2).split([8, 8], -1)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, 4, -1, -1)], -1)
    return (q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("kernels", ["auto", "triton", "gluon"])
def test_the_option_holds_while_the_compiled_code_runs(monkeypatch, kernels):
    asked, compile_fx_inner = [], codegen.compile_fx_inner

    def inner(*arguments, **named):
        compiled = compile_fx_inner(*arguments, **named)

        def call(inputs):
            asked.append(asked_for())
            return compiled(inputs)

        call._boxed_call = True
        return call

    monkeypatch.setattr(codegen, "compile_fx_inner", inner)
    inputs = torch.randn(1, 4, 1, 12), torch.randn(1, 200, 16), torch.randn(1, 200, 4), torch.randn(16, 64)
    compiled = torch.compile(absorbed, backend="mla", options={"mla.kernels": kernels})
    torch.testing.assert_close(compiled(*inputs), absorbed(*inputs))
    assert mla_compile.last_report().rewritten == 1
    assert (asked, asked_for()) == ([kernels], "auto")


P, ROPE, V, HEADS, TOKENS = 128, 64, 128, 4, 6
FORWARD, GRADIENTS = "mla::expanded_attention", "mla::expanded_attention_backward"


def trained(q, latent, k_rope, w, mask=None):
    """MLA over its own tokens: q `[1, N, T, P + R]`, w `[L, N (P + V)]`."""
    k_nope, v = (latent @ w).view(1, -1, HEADS, P + V).transpose(1, 2).split([P, V], -1)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, HEADS, -1, -1)], -1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)


def checkpointed(*inputs):
    return torch.utils.checkpoint.checkpoint(trained, *inputs, use_reentrant=False)


def inputs(dtype=torch.bfloat16, learned="w", **more):
    sizes = {"q": (1, HEADS, TOKENS, P + ROPE), "latent": (1, TOKENS, 16), "k_rope": (1, TOKENS, ROPE)}
    sizes |= {"w": (16, HEADS * (P + V)), **more}
    return [torch.randn(size, dtype=dtype).requires_grad_(name == learned) for name, size in sizes.items()]


MASK = {"mask": (1, 1, TOKENS, TOKENS)}
TRAINED = {
    "on Hopper": (trained, inputs, {}, [f"{FORWARD}: cuDNN", f"{GRADIENTS}: cuDNN"]),
    "in a checkpoint": (checkpointed, inputs, {}, [f"{FORWARD}: cuDNN", f"{GRADIENTS}: cuDNN"]),
    "ours alone": (trained, inputs, {"mla.kernels": "triton"}, [f"{FORWARD}: triton", f"{GRADIENTS}: triton"]),
    "another dtype": (
        trained,
        lambda: inputs(torch.float32),
        {},
        [f"{op}: triton; cuDNN does not take torch.float32" for op in (FORWARD, GRADIENTS)],
    ),
    "a mask": (
        trained,
        lambda: inputs(**MASK),
        {},
        [f"{op}: triton; cuDNN does not take a mask" for op in (FORWARD, GRADIENTS)],
    ),
    "a mask that learns": (
        lambda *given: trained(*given[:4], given[4] * 2),
        lambda: inputs(learned="mask", **MASK),
        {},
        [
            f"{FORWARD}: triton; cuDNN does not take a mask",
            f"{GRADIENTS}: ATen operations, for the gradient of a mask",
        ],
    ),
    "gradients of another layer": (
        lambda *given: trained(*given[:4]) * given[4],
        lambda: inputs(learned="gate", gate=(1, 1, 1, V)),
        {},
        [f"{FORWARD}: cuDNN"],
    ),
}


@pytest.fixture
def cudnn(install, monkeypatch):
    """A process with a version of cuDNN that is taken, in which tensors count as a GPU's, and as many."""
    monkeypatch.setattr(gpu_kernels, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    monkeypatch.setattr(expansions, "at_least", lambda queries: expansions.MANY)


@pytest.mark.usefixtures("without_codegen", "cudnn")
@pytest.mark.parametrize(("model", "make", "options", "said"), TRAINED.values(), ids=TRAINED)
def test_a_report_of_a_training_graph_names_what_computes_gradients(model, make, options, said):
    with torch.enable_grad():
        torch.compile(model, backend="mla", options=options)(*make())
    report = mla_compile.last_report()
    assert [site.path for site in report.sites] == ["chunked"]
    assert list(report.kernels) == said


@pytest.mark.usefixtures("without_codegen", "cudnn")
def test_sizes_that_are_symbols_in_training_are_left_to_each_call():
    given = inputs()
    for tensor, of_tokens in zip(given, (2, 1, 1), strict=False):
        torch._dynamo.mark_dynamic(tensor, of_tokens)
    with torch.enable_grad():
        torch.compile(trained, backend="mla")(*given)
    said = mla_compile.last_report().kernels
    assert said == tuple(f"{op}: decided at each call, by its sizes" for op in (FORWARD, GRADIENTS))


@pytest.mark.usefixtures("without_codegen")
def test_nothing_is_said_of_a_training_graph_on_cpu():
    with torch.enable_grad():
        torch.compile(trained, backend="mla")(*inputs(torch.float32))
    assert (mla_compile.last_report().rewritten, mla_compile.last_report().kernels) == (1, ())
