"""A batch that has all its pages from the start, and its lengths on the device: one graph serves all lengths."""

import pytest
import torch

import mla_compile
from mla_compile import PagedLatentCache
from mla_compile.inductor import codegen
from mla_compile.inductor.interpreted import interpreted
from tests.hf import families
from tests.hf.test_deepseek import build
from tests.hf.test_paged_cache import SEARCHES, generate, prompt

transformers = pytest.importorskip("transformers")

FP8 = torch.float8_e4m3fn


def fixed(model, batch, tokens=32, **more):
    return PagedLatentCache.of(model, pages=96, page_size=4, batch=batch, tokens=tokens, **more)


@pytest.mark.parametrize("search", SEARCHES)
def test_generation_is_that_with_a_dynamic_cache(search):
    model = build("v3")
    inputs = prompt(1 if search == "lookup" else 2, padded=search != "lookup")
    expected = generate(model, inputs, transformers.DynamicCache(config=model.config), SEARCHES[search])
    sequences = {"beams": 6, "sampling beams": 6, "sampling several": 6, "lookup": 1}.get(search, 2)
    cache = fixed(model, sequences)
    assert torch.equal(generate(model, inputs, cache, SEARCHES[search]), expected)
    assert int(cache.get_seq_length()) == expected.shape[1] - 1
    cache.reset()
    assert cache.pool.available == 96


def test_generation_goes_on_from_a_forked_prompt():
    model, inputs = build("v3"), prompt(1)
    cache = fixed(model, 1)
    model(**{name: tensor[:, :-1] for name, tensor in inputs.items()}, past_key_values=cache)
    for length in (12, 6):
        fork = cache.fork()
        more = {"max_new_tokens": length, "min_new_tokens": length}
        assert torch.equal(generate(model, inputs, fork, more), generate(model, inputs, None, more))
        fork.reset()
    assert int(cache.get_seq_length()) == 8
    cache.crop(-5)
    assert repr(cache) == "PagedLatentCache(3 tokens, 88 pages free)"


@pytest.fixture
def graphs(monkeypatch):
    """Each graph that is compiled, with which of its inputs are numbers and which are static."""
    found = []

    def inner(module, inputs, **options):
        found.append((module, [not isinstance(x, torch.Tensor) for x in inputs], options.get("static_input_idxs", ())))
        return interpreted(module, inputs)

    monkeypatch.setattr(codegen, "compile_fx_inner", inner)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield found


def written(module):
    """Inputs of a graph that it writes to."""
    places = {node: i for i, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    changed = set()
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            changed.add(places.get(node.args[0]))
    return changed - {None}


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        pytest.param({}, 2, id="model's dtype"),
        pytest.param({"dtype": FP8}, 1, id="FP8"),
        pytest.param({"dtype": FP8, "scale": 0.01}, 1, id="FP8 of one scale", marks=pytest.mark.slow),
        pytest.param({"dtype": torch.int8}, 1, id="INT8", marks=pytest.mark.slow),
    ],
)
def test_64_tokens_are_one_graph_that_knows_no_length_and_writes_in_place(graphs, kind, layers):
    model, tokens = build("v3", layers=layers), torch.randint(1, 64, (2, 72))
    cache = fixed(model, 2, 72, **kind)
    exact = fixed(model, 2, 72, **kind)
    eager = [model(tokens[:, :4], past_key_values=c).logits for c in (cache, exact)]
    assert torch.equal(*eager)
    step = torch.compile(model, backend="mla", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(4, 72):
            found = step(tokens[:, i : i + 1], past_key_values=cache).logits
            expected = model(tokens[:, i : i + 1], past_key_values=exact).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 if not kind else 1e-2)
    ((module, numbers, static),) = graphs
    assert not any(numbers)
    sizes = {size for node in module.graph.nodes for size in getattr(node.meta.get("val"), "shape", ())}
    assert all(isinstance(size, int) for size in sizes)
    assert written(module)
    assert written(module) <= set(static)
    assert int(cache.get_seq_length()) == 72
    (report,) = mla_compile.reports()
    assert len(report.sites) == layers
    assert all(site.path == "absorbed" and site.reason.endswith("reads the pages") for site in report.sites)


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(("search", "layers"), [pytest.param("greedy", 2, marks=pytest.mark.slow), ("beams", 1)])
def test_compiled_generation_is_eagers(search, layers):
    model, inputs = build("v3", layers=layers), prompt(2, padded=True)
    expected = generate(model, inputs, None, SEARCHES[search])
    model.compile(backend="mla", fullgraph=True)
    cache = fixed(model, 6 if search == "beams" else 2)
    assert torch.equal(generate(model, inputs, cache, SEARCHES[search]), expected)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(mla_compile.reports()) == 2  # the prompt and a token
    assert all(report.rewritten == layers for report in mla_compile.reports())


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"batch": 2}, "expected batch and tokens to be given together"),
        ({"tokens": 8}, "expected batch and tokens to be given together"),
        ({"batch": 2, "tokens": 8, "mesh": object()}, "and without a mesh"),
        ({"batch": 0, "tokens": 8}, "expected batch to be at least 1, found 0"),
        ({"batch": 2, "tokens": 0}, "expected tokens to be at least 1, found 0"),
    ],
)
def test_what_does_not_go_together(more, expected):
    with pytest.raises(mla_compile.CacheMismatchError, match=expected):
        PagedLatentCache.of(build("v3"), pages=4, **more)


def test_what_does_not_fit():
    with pytest.raises(mla_compile.OutOfPagesError, match="expected 6 free pages, found 4 of 4"):
        PagedLatentCache.of(build("v3"), pages=4, page_size=4, batch=2, tokens=9)
    model = families.build(families.FAMILIES["deepseek_v32"], "sdpa")
    with pytest.raises(mla_compile.CacheMismatchError, match="have a DynamicIndexedLayer: let"):
        PagedLatentCache.of(model, pages=4, batch=1, tokens=8)
