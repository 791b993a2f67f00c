"""Compiled on a GPU: prefill, decode and several tokens over a dense cache and over pages, CUDA graphs included."""

import copy
import runpy
from pathlib import Path

import pytest
import torch

import mla_compile
from tests.compile import test_fp8_pages as fp8
from tests.compile import test_pool_size as layers
from tests.errors import DRAWS, assert_as_close_as_eager, assert_as_close_as_eager_on_average

pytestmark = pytest.mark.gpu
EXAMPLES = Path(__file__).parents[2] / "examples"
MODES = ["default", "reduce-overhead", "max-autotune"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "path"), [(1, "absorbed"), (4, "absorbed"), (300, "chunked")])
def test_a_dense_cache(tokens, path, dtype, mode):
    make = runpy.run_path(str(EXAMPLES / "plain_mla.py"))["NaiveMLA"]
    layer = make().to("cuda", dtype)
    exact_layer = make().to("cuda", torch.float64)
    exact_layer.load_state_dict(layer.state_dict())
    x = torch.randn(2, tokens, 1024, device="cuda", dtype=dtype)
    past = tuple(torch.randn(2, 700, width, device="cuda", dtype=dtype) for width in (layer.L, layer.R))
    exact, _ = exact_layer(x.double(), tuple(t.double() for t in past))
    eager, _ = layer(x, past)
    options = torch._inductor.list_mode_options(mode) | {"mla.path": path}  # torch takes a mode or options
    compiled = torch.compile(layer, backend="mla", options=options)
    for _ in range(3):  # a CUDA graph is recorded at the second call and replayed at the third
        result, _ = compiled(x, past)
        assert_as_close_as_eager(result, eager, exact)
    assert [site.path for site in mla_compile.last_report().sites] == [path]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients(dtype, mode):
    make = runpy.run_path(str(EXAMPLES / "plain_mla.py"))["NaiveMLA"]
    layer = make().to("cuda", dtype)
    exact_layer = make().to("cuda", torch.float64)
    exact_layer.load_state_dict(layer.state_dict())
    x = torch.randn(2, 300, 1024, device="cuda", dtype=dtype)

    def gradients(function, module, x):
        past = tuple(x.new_zeros(2, 0, width) for width in (module.L, module.R))
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(function(x, past)[0].square().mean(), [x, *module.parameters()])

    exact, eager = gradients(exact_layer, exact_layer, x.double()), gradients(layer, layer, x)
    compiled = torch.compile(layer, backend="mla", mode=mode)
    for _ in range(3):
        for found, expected, right in zip(gradients(compiled, layer, x), eager, exact, strict=True):
            assert_as_close_as_eager(found, expected, right)
    assert [site.path for site in mla_compile.last_report().sites] == ["chunked"]


@pytest.mark.parametrize("mode", MODES)
def test_pages(mode):
    example = runpy.run_path(str(EXAMPLES / "paged.py"))
    layer = example["PagedMLA"]().cuda()
    exact_layer = example["PagedMLA"]().cuda().double()
    exact_layer.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, backend="mla", mode=mode, fullgraph=True)
    pool = torch.randn(64, 16, layer.L + layer.R, device="cuda")
    torch._dynamo.mark_static_address(pool)  # else no CUDA graph may write to it
    table = torch.randperm(64, device="cuda")[:60].view(3, 20)
    for lengths in ([301, 46, 171], [302, 47, 172], [5, 320, 1]):  # the same graph for all
        lengths = torch.tensor(lengths, device="cuda")
        x = torch.randn(3, 1, 256, device="cuda")
        exact = exact_layer(x.double(), pool.double(), table, lengths)
        eager = layer(x, pool.clone(), table, lengths)
        assert_as_close_as_eager(compiled(x, pool, table, lengths), eager, exact)
    (site,) = mla_compile.last_report().sites
    assert site.reason.endswith("reads the pages")
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("mode", MODES)
def test_pages_in_fp8(mode):
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Inductor generates no e4m3 for this GPU")
    check_pages_in_fp8(mode, "cuda")


def check_pages_in_fp8(mode, device):
    numbers, scales = torch.randn(64, fp8.PAGE_SIZE, fp8.L).to(fp8.FP8), torch.rand(64, fp8.PAGE_SIZE, fp8.G)
    rope, table = torch.randn(64, fp8.PAGE_SIZE, fp8.R), torch.randperm(64)[:40].view(2, 20)
    # Each group has e4m3 numbers, of which 7 is the greatest: 448 over a power of two. Quantising rounds none of them.
    new = torch.randn(2, fp8.L + fp8.R).clamp(-6, 6).to(fp8.FP8).float()
    new[:, : fp8.L : fp8.L // fp8.G] = 7.0
    q, weight = torch.randn(2, fp8.N, 1, fp8.P + fp8.R), torch.randn(fp8.N * (fp8.P + fp8.V), fp8.L) / fp8.L**0.5
    given = [t.to(device, copy=True) for t in (q, weight, numbers, scales, rope, table)]
    for tensor in given[2:5]:
        torch._dynamo.mark_static_address(tensor)  # else no CUDA graph may write to it
    compiled = torch.compile(fp8.step, backend="mla", mode=mode, fullgraph=True)
    draws = []
    for first in range(DRAWS):  # the same graph for all
        lengths = torch.tensor([301 + first, 46 - 2 * first] if first % 2 else [5 + first, 320])
        eager = fp8.step(q, weight, numbers, scales, rope, table, lengths, new)  # not every device indexes FP8
        keys = (t.double() for t in fp8.read(numbers, scales, rope, table))
        exact = fp8.attend(q.double(), *keys, weight.double(), lengths)
        draws.append((compiled(*given, lengths.to(device), new.to(device)).cpu(), eager, exact))
        assert torch.equal(given[2].view(torch.uint8).cpu(), numbers.view(torch.uint8))
    assert_as_close_as_eager_on_average(*zip(*draws, strict=True))
    (site,) = mla_compile.last_report().sites
    assert site.reason.endswith("reads the pages")


@pytest.mark.parametrize("mode", MODES)
def test_a_static_cache(mode):
    transformers = pytest.importorskip("transformers")
    settings = {"dtype": torch.float32, "experts_implementation": "batched_mm"}  # the default takes no float64
    model = transformers.AutoModelForCausalLM.from_pretrained(EXAMPLES / "tiny-deepseek-v3", **settings).cuda()
    exact_model = copy.deepcopy(model).double()
    ids = torch.randint(1000, (2, 40), device="cuda")

    def prefilled(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=1000)
        model(ids[:, :8], past_key_values=cache, use_cache=True)
        return cache

    def decode(model, cache):
        steps = [(i, i + 1) for i in range(8, 20)] + [(20, 24), (24, 28), (28, 32)]
        return [model(ids[:, a:b], past_key_values=cache, use_cache=True).logits.clone() for a, b in steps]

    exact, eager = (decode(m, prefilled(m)) for m in (exact_model, model))
    cache = prefilled(model)  # before it is compiled: transformers marks its tensors for CUDA graphs then
    model.compile(backend="mla", mode=mode)
    for found, expected, right in zip(decode(model, cache), eager, exact, strict=True):
        assert_as_close_as_eager(found, expected, right)
    reports = mla_compile.reports()
    assert len(reports) == 2  # one token, and several
    assert all(site.path == "absorbed" for report in reports for site in report.sites)
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tokens", "path"), [(4, "absorbed"), (300, "chunked")])
def test_several_tokens_over_pages_of_unequal_sequences(tokens, path, mode):
    options = torch._inductor.list_mode_options(mode) | {"mla.path": path}
    compiled = torch.compile(layers.step, backend="mla", options=options, fullgraph=True)
    q, pools, table, _, weight, new = layers.inputs(tokens, 200)
    pools = [pool.cuda() for pool in pools]
    q, table, weight, new = (t.cuda() for t in (q, table, weight, new))
    for lengths in ([640, 310], [301, 640], [500, 500]):  # the same graph for all
        given = table, torch.tensor(lengths, device="cuda"), weight, new
        doubles = (t.double() if t.is_floating_point() else t for t in given)
        exact = layers.step(q.double(), [pool.double() for pool in pools], *doubles)
        eager = layers.step(q, [pool.clone() for pool in pools], *given)
        assert_as_close_as_eager(compiled(q, pools, *given), eager, exact)
    sites = mla_compile.last_report().sites
    assert [site.path for site in sites] == [path] * len(pools)
    assert all(site.reason.endswith("reads the pages") for site in sites)


@pytest.mark.parametrize(("tokens", "path"), [(1, "absorbed"), (300, "chunked")])
def test_memory_does_not_grow_with_the_pool(tokens, path):
    compiled = torch.compile(layers.step, backend="mla", options={"mla.path": path}, fullgraph=True)
    taken = []
    for pages in (layers.SMALL, layers.LARGE):
        q, pools, *rest = layers.inputs(tokens, pages)
        given = q.cuda(), [pool.cuda() for pool in pools], *(t.cuda() for t in rest)
        for pool in given[1]:
            torch._dynamo.mark_dynamic(pool, 0)
        compiled(*given)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compiled(*given)
        taken.append(torch.cuda.max_memory_allocated() - before)
    assert taken[0] == taken[1]
