"""Exported programs: rewritten and lowered, as right as eager for every size that they are declared for."""

import copy
import io
import subprocess
import sys

import pytest
import torch
from torch import fx, nn
from torch.export import Dim
from torch.profiler import ProfilerActivity, profile

import mla_compile
from mla_compile import exported
from mla_compile.cost import Device
from mla_compile.kernels.dispatcher import takes
from mla_compile.passes.paths import by_heads
from tests.errors import assert_as_close_as_eager
from tests.models import HIDDEN, Combined, L, N, P, R, Separate, V

pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning")

SIZES = [(1, 0), (1, 1), (1, 93), (2, 5), (7, 0), (7, 94), (60, 3), (60, 61)]
"""Query tokens and tokens of the cache: both ends of each range, and both sides of where the paths cross."""
COUNTING = Device("that only counts FLOPs", 1e9, 1e18)
"""On it the paths of `Combined` cross at 352 T / (10 T + 352) queries: c T / (c + T) with c = 35.2."""


class Step(nn.Module):
    """`Combined` with its cache as inputs and outputs."""

    def __init__(self):
        super().__init__()
        self.attention = Combined()

    def forward(self, x, latent, k_rope):
        output, cache = self.attention(x, (latent, k_rope))
        return output, *cache


class Buffers(nn.Module):
    """`Separate` with its cache as buffers, written in place."""

    def __init__(self):
        super().__init__()
        self.attention = Separate()
        for name, value in Separate().empty_cache(2).items():
            self.register_buffer(name, value)

    def forward(self, x):
        names = "latent", "k_rope", "length"
        output, cache = self.attention(x, {name: getattr(self, name).clone() for name in names})
        for name in names:
            getattr(self, name).copy_(cache[name])
        return output


def inputs(queries, tokens, dtype=torch.float32):
    return tuple(torch.randn(2, size, width).to(dtype) for size, width in ((queries, HIDDEN), (tokens, L), (tokens, R)))


@pytest.fixture(scope="module")
def step():
    """A module, and its program."""
    module = Step().eval()
    return module, export(module)


def export(module, dtype=torch.float32, queries=3, tokens=7):
    """The program of a step for 1 to 64 queries after 0 to 100 tokens."""
    dims = Dim("Sq", min=1, max=64), Dim("T", min=0, max=100)
    example = inputs(queries, tokens, dtype)
    return torch.export.export(module, example, dynamic_shapes=({1: dims[0]}, {1: dims[1]}, {1: dims[1]}))


def check(run, module, dtype=torch.float32):
    """Compare each output, over all sizes together, with eager and float64."""
    exact, results = copy.deepcopy(module).double(), []
    for queries, tokens in SIZES:
        arguments = inputs(queries, tokens, dtype)
        results.append((run(*arguments), module(*arguments), exact(*(t.double() for t in arguments))))
    for outputs in zip(*(zip(*of_a_size, strict=True) for of_a_size in results), strict=True):
        assert all(len({t.shape for t in of_a_size}) == 1 for of_a_size in outputs)
        assert_as_close_as_eager(*(torch.cat([t.flatten() for t in kind]) for kind in zip(*outputs, strict=True)))


def graphs(program):
    """The graph of a program, and those of its branches and loops."""
    return [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]


def elements(program, symbols):
    """The number of elements of every tensor of a program, for the given values of its symbols, in their order."""
    values = [node.meta.get("val") for graph in graphs(program) for node in graph.nodes]
    tensors = [v for value in values for v in (value if isinstance(value, list | tuple) else (value,))]
    numbers = dict(zip(program.range_constraints, symbols, strict=True))
    sizes = [t.numel() for t in tensors if isinstance(t, torch.Tensor)]
    return [int(s.node.expr.subs(numbers)) if isinstance(s, torch.SymInt) else s for s in sizes]


def targets(program):
    return {str(node.target) for graph in graphs(program) for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize(
    ("path", "ops", "dtype"),
    [
        ("absorbed", "latent_attention", torch.float32),
        # covered in every run by test_a_program_that_was_stored
        pytest.param("chunked", "expanded_attention", torch.float32, marks=pytest.mark.slow),
        pytest.param("chunked", "expanded_attention", torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rewritten_and_lowered_are_right_for_all_sizes(path, ops, dtype):
    module = Step().to(dtype).eval()
    options = {"mla.path": path, "mla.workspace_tokens": 16, "mla.strict": True}
    program = mla_compile.rewrite(export(module, dtype), options=options)
    assert f"mla.{ops}.default" in targets(program)
    check(program.module(), module, dtype)
    lowered = mla_compile.lower(program)
    assert not any("mla." in target for target in targets(lowered))
    check(lowered.module(), module, dtype)
    for symbols in ([7, 94], [94, 7]):  # 101 keys, whichever symbol is Sq
        up_projected = {2 * 101 * N * width for width in (P, R, V, P + R, P + V)}
        assert up_projected.isdisjoint(elements(program, symbols))
        assert up_projected.isdisjoint(elements(lowered, symbols))


def test_the_graph_takes_the_path_that_is_faster_at_the_sizes_of_the_run(step, monkeypatch):
    monkeypatch.setattr(exported, "rates_of", lambda _: COUNTING)
    module, program = step[0], mla_compile.rewrite(step[1])
    (site,) = mla_compile.last_report().sites
    assert site.path == "absorbed or chunked"
    check(program.module(), module)
    for queries, tokens in SIZES:
        keys = queries + tokens
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            program.module()(*inputs(queries, tokens))
        ran = {event.name for event in profiled.events()} & {"mla::latent_attention", "mla::expanded_attention"}
        absorbs = queries * (10 * keys + 352) <= 352 * keys
        assert ran == {"mla::latent_attention" if absorbs else "mla::expanded_attention"}, (queries, tokens)


def test_one_path_where_that_is_the_faster_one_for_all_sizes(monkeypatch):
    monkeypatch.setattr(exported, "rates_of", lambda _: COUNTING)
    dims = {1: Dim("T", min=20, max=100)}
    example = inputs(1, 30)
    mla_compile.rewrite(torch.export.export(Step(), example, dynamic_shapes=(None, dims, dims)))
    (site,) = mla_compile.last_report().sites
    assert (site.path, site.guards) == ("absorbed", ())
    assert "at all declared sizes" in site.reason


def test_static_sizes():
    module = Step().eval()
    program = mla_compile.lower(mla_compile.rewrite(torch.export.export(module, inputs(1, 40))))
    assert mla_compile.last_report().sites[0].path in ("absorbed", "chunked")
    arguments = inputs(1, 40)
    exact = copy.deepcopy(module).double()(*(t.double() for t in arguments))
    assert_as_close_as_eager(program.module()(*arguments)[0], module(*arguments)[0], exact[0])


def test_a_cache_in_buffers_is_written():
    module = Buffers().eval()
    exact, example = copy.deepcopy(module).double(), (torch.randn(2, 3, HIDDEN),)
    program = torch.export.export(copy.deepcopy(module), example, dynamic_shapes=({1: Dim("Sq", min=1, max=24)},))
    options = {"mla.path": "absorbed", "mla.strict": True}
    run = mla_compile.lower(mla_compile.rewrite(program, options=options)).module()
    for queries in (6, 1, 1, 3):
        x = torch.randn(2, queries, HIDDEN)
        assert_as_close_as_eager(run(x), module(x), exact(x.double()))
    assert run.length == 11


class ByHand(nn.Module):
    """Scores and softmax by hand, in float32, as DeepSeek's own code has them."""

    def forward(self, q, latent, w_uk, w_uv):
        scores = q @ (latent @ w_uk.mT).mT
        weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        return weights @ (latent @ w_uv.mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_softmax_in_float32_and_a_cast(dtype):
    """`torch.export` adds an assertion on each tensor that is cast, which must not count as another reader of it."""
    q, latent = torch.randn(2, 4, 3, 8, dtype=dtype), torch.randn(2, 1, 40, 16, dtype=dtype)
    arguments = q, latent, *(torch.randn(2, 4, 8, 16) / 4).to(dtype)
    program = mla_compile.rewrite(torch.export.export(ByHand(), arguments), options={"mla.strict": True})
    exact = ByHand()(*(t.double() for t in arguments))
    assert_as_close_as_eager(program.module()(*arguments), ByHand()(*arguments), exact)


def test_lowered_but_for_kernels(step, monkeypatch):
    """Ops for which there are C++ kernels stay; everything else is lowered."""
    monkeypatch.setattr(exported, "rates_of", lambda _: COUNTING)
    module, program = step
    lowered = mla_compile.lower(mla_compile.rewrite(program, options={"mla.workspace_tokens": 16}), kernels=True)
    kept = {target for target in targets(lowered) if target.startswith("mla.")}
    assert kept == {f"mla.{op}.default" for op in ("latent_attention", "expanded_attention", "per_head_matmul")}
    check(lowered.module(), module)


MASK = torch.ones(1, 1, 1, 9, dtype=torch.bool)


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"mask": MASK}, False),
        ({"mask": MASK, "indices": None}, True),
        ({"uniform_when_empty": True}, False),
        ({"latent": torch.zeros(1, 0, 8), "k_rope": torch.zeros(1, 0, 4)}, False),
        ({"q_latent": torch.zeros(1, 1, 2, 8, dtype=torch.float64)}, False),
        ({"latent": torch.zeros(1, 9, 8, device="meta")}, False),
    ],
)
def test_what_kernels_take(changes, taken):
    shapes = {"q_latent": (1, 1, 2, 8), "q_rope": (1, 1, 2, 4), "latent": (1, 9, 8), "k_rope": (1, 9, 4)}
    arguments = {name: torch.zeros(shape) for name, shape in shapes.items()}
    arguments |= {"indices": torch.zeros(1, 1, 3), "mask": None, "uniform_when_empty": False}
    arguments |= changes
    op = "latent_attention" if arguments["indices"] is None else "sparse_latent_attention"
    assert takes(op, arguments) is taken


def test_the_given_program_stays_as_it_is(step):
    _, program = step
    before = str(program.graph)
    mla_compile.rewrite(program)
    assert str(program.graph) == before


def test_a_program_that_was_stored(step):
    (module, program), file = step, io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    program = mla_compile.lower(mla_compile.rewrite(torch.export.load(file), options={"mla.path": "chunked"}))
    again = io.BytesIO()
    torch.export.save(program, again)
    again.seek(0)
    check(torch.export.load(again).module(), module)


class Mixed(nn.Module):
    """An MLA attention whose result is an output of the graph, and an attention whose keys are no up-projection."""

    def forward(self, q, latent, w_uk, w_uv, k, v):
        first = nn.functional.scaled_dot_product_attention(q, latent @ w_uk.mT, latent @ w_uv.mT)
        return first, nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)


def test_what_is_no_mla_stays_what_it_was():
    q, latent, cache = torch.randn(2, 4, 1, 8), torch.randn(2, 1, 40, 16), torch.randn(2, 2, 4, 40, 8)
    arguments = q, latent, *torch.randn(2, 4, 8, 16), *cache
    program = mla_compile.rewrite(torch.export.export(Mixed(), arguments), options={"mla.path": "absorbed"})
    assert [site.rewritten for site in mla_compile.last_report().sites] == [True, False]
    (kept,) = [n for n in program.graph.nodes if n.target is torch.ops.aten.scaled_dot_product_attention.default]
    assert kept.args[5] is True
    assert kept.kwargs["scale"] == 0.5
    exact = Mixed()(*(t.double() for t in arguments))
    for outputs in zip(program.module()(*arguments), Mixed()(*arguments), exact, strict=True):
        assert_as_close_as_eager(*outputs)
    with pytest.raises(mla_compile.StrictError, match="1 of 2 attentions stay unchanged"):
        mla_compile.rewrite(torch.export.export(Mixed(), arguments), options={"mla.strict": True})


def test_options(step):
    _, program = step
    assert mla_compile.rewrite(program, options={"mla.path": "off"}) is program
    assert "mla.path is off" in mla_compile.last_report().note
    with pytest.raises(mla_compile.OptionError, match="found 'max_autotune'"):
        mla_compile.rewrite(program, options={"max_autotune": True})
    with pytest.raises(mla_compile.OptionError, match=r"mla\.kernels: expected auto for an exported program"):
        mla_compile.rewrite(program, options={"mla.kernels": "triton"})


@pytest.mark.parametrize("function", [mla_compile.rewrite, mla_compile.lower])
def test_a_module_is_no_program(function):
    with pytest.raises(TypeError, match=r"expected a program of torch\.export\.export, found Linear"):
        function(torch.nn.Linear(2, 2))


def test_verify_runs_the_example(step, monkeypatch):
    mla_compile.rewrite(step[1], options={"mla.verify": True})
    monkeypatch.setattr("mla_compile.verify.ROUNDINGS", 0)
    with pytest.raises(mla_compile.VerifyError):
        mla_compile.rewrite(step[1], options={"mla.verify": True})


WITHOUT_PYTHON = """
import sys
import torch
torch.ops.load_library(sys.argv[1])
run = torch._inductor.aoti_load_package(sys.argv[2])
torch.save([run(*arguments) for arguments in torch.load(sys.argv[3])], sys.argv[4])
assert not any(name.startswith("mla_compile") for name in sys.modules)
"""


@pytest.mark.slow
def test_a_package_with_kernels_runs_where_this_library_is_not(step, tmp_path, monkeypatch):
    monkeypatch.setattr(exported, "rates_of", lambda _: COUNTING)
    module, program = step
    lowered = mla_compile.lower(mla_compile.rewrite(program, options={"mla.workspace_tokens": 16}), kernels=True)
    paths = [str(tmp_path / name) for name in ("libmla.so", "step.pt2", "given", "results")]
    mla_compile.build_library(paths[0])
    torch._inductor.aoti_compile_and_package(lowered, package_path=paths[1])
    given = [inputs(*size) for size in SIZES]
    torch.save(given, paths[2])
    subprocess.run([sys.executable, "-c", WITHOUT_PYTHON, *paths], check=True)
    exact = copy.deepcopy(module).double()
    for arguments, results in zip(given, torch.load(paths[3]), strict=True):
        truth = exact(*(t.double() for t in arguments))
        for outputs in zip(results, module(*arguments), truth, strict=True):
            assert_as_close_as_eager(*outputs)


@pytest.mark.slow  # packages of one path are in tests/test_lowered.py
def test_a_package_of_both_paths(step, tmp_path, monkeypatch):
    monkeypatch.setattr(exported, "rates_of", lambda _: COUNTING)
    module, program = step
    program = mla_compile.lower(mla_compile.rewrite(program, options={"mla.workspace_tokens": 16}))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "step.pt2"))
    check(torch._inductor.aoti_load_package(package), module)


class OwnKeys(nn.Module):
    """Values are up-projected from one latent, and so are keys, but these are `normed`, or half of their columns are
    changed (`own ropes`), or the scores have a `soft cap`: the `kind`."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.q, self.down = nn.Linear(HIDDEN, N * P), nn.Linear(HIDDEN, L)
        self.up = nn.Linear(L, N * (P + V))

    def forward(self, x, past):
        latent = torch.cat([past, self.down(x)], 1)
        k, v = self.up(latent).unflatten(-1, (N, P + V)).transpose(1, 2).split([P, V], -1)
        q = self.q(x).unflatten(-1, (N, P)).transpose(1, 2)
        seen = torch.arange(latent.shape[1]) <= torch.arange(past.shape[1], latent.shape[1])[:, None]
        if self.kind == "soft cap":
            scores = 3 * torch.tanh(q @ k.mT / 3)
            return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        if self.kind == "own ropes":
            k = torch.cat([k[..., : P // 2], k[..., P // 2 :].sin()], -1)
        else:
            k = nn.functional.rms_norm(k, (P,))
        return nn.functional.scaled_dot_product_attention(q, k, v, seen)


OWN_KEYS = {"normed": "values", "own ropes": "absorbed", "soft cap": "chunked"}


def program_of_own_keys(kind, monkeypatch):
    """The module of a kind, and its lowered program for any batch, number of queries and length of the cache."""
    monkeypatch.setattr(by_heads, "SCORES_BYTES", 1)  # a loop over heads
    module = OwnKeys(kind).eval()
    batch, queries, tokens = Dim("B", min=1, max=8), Dim("Sq", min=2, max=8), Dim("T", min=1, max=4000)
    shapes = {0: batch, 1: queries}, {0: batch, 1: tokens}
    program = torch.export.export(module, given_own_keys(2, 3, 60), dynamic_shapes=shapes)
    path = "chunked" if kind == "soft cap" else "auto"
    lowered = mla_compile.lower(mla_compile.rewrite(program, options={"mla.path": path}))
    assert [site.path for site in mla_compile.last_report().sites] == [OWN_KEYS[kind]]
    return module, lowered


def given_own_keys(batch, queries, tokens):
    return torch.randn(batch, queries, HIDDEN), torch.randn(batch, tokens, L)


def check_own_keys(run, module):
    exact = copy.deepcopy(module).double()
    for sizes in ((2, 3, 60), (1, 8, 1), (8, 2, 400)):
        given = given_own_keys(*sizes)
        assert_as_close_as_eager(run(*given), module(*given), exact(*(t.double() for t in given)))


@pytest.mark.parametrize(
    "kind",
    [pytest.param("normed", marks=pytest.mark.slow), pytest.param("own ropes", marks=pytest.mark.slow), "soft cap"],
)
def test_keys_of_their_own(kind, monkeypatch):
    module, lowered = program_of_own_keys(kind, monkeypatch)
    check_own_keys(lowered.module(), module)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN_KEYS)
def test_a_package_of_keys_of_their_own(kind, monkeypatch, tmp_path):
    """With a soft cap, the program has a loop, which gets the length of the cache as a number."""
    module, lowered = program_of_own_keys(kind, monkeypatch)
    package = torch._inductor.aoti_compile_and_package(lowered, package_path=str(tmp_path / "step.pt2"))
    check_own_keys(torch._inductor.aoti_load_package(package), module)
