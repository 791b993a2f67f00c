"""A cache that is written in place gives what transformers' own gives, eager and compiled, and is not copied."""

import pytest
import torch

import mla_compile
from mla_compile import LatentCache
from mla_compile.errors import CacheMismatchError
from tests.hf import families
from tests.hf.test_deepseek import build
from tests.hf.test_paged_cache import SEARCHES, generate, prompt

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("search", SEARCHES)
def test_generation_is_that_with_a_dynamic_cache(search):
    model = build("v3")
    inputs = prompt(1 if search == "lookup" else 2, padded=search != "lookup")
    expected = generate(model, inputs, transformers.DynamicCache(config=model.config), SEARCHES[search])
    cache = LatentCache.of(model)
    assert torch.equal(generate(model, inputs, cache, SEARCHES[search]), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_takes_it_for_a_dynamic_cache(name):
    """Keys of indexers grow like latents. Sliding windows and states of linear attention stay transformers' own."""
    model, ids = families.build(families.FAMILIES[name], "eager"), families.some_ids()
    caches = transformers.DynamicCache(config=model.config), LatentCache.of(model)
    for start, stop in ((0, 5), (5, 6), (6, 8)):
        with torch.no_grad():
            expected, found = (model(ids[:, start:stop], past_key_values=cache).logits for cache in caches)
        assert torch.equal(found, expected)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 8


def steps(model, cache, ids):
    """The logits of a token at a time."""
    with torch.no_grad():
        return torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(ids.shape[1])], dim=1)


CHANGES = {
    "cropped": lambda cache: cache.crop(-3),
    "reset": lambda cache: cache.reset(),
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeated": lambda cache: cache.batch_repeat_interleave(1),
    "selected": lambda cache: cache.batch_select_indices(torch.tensor([1, 1])),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_changes_to_it_are_those_of_a_dynamic_cache(family, change):
    model, ids = families.build(families.FAMILIES[family], "eager"), families.some_ids()
    found = []
    for cache in (transformers.DynamicCache(config=model.config), LatentCache.of(model, tokens=2)):
        steps(model, cache, ids[:, :6])
        change(cache)
        found.append(steps(model, cache, ids[:, 6:10]))
    assert torch.equal(*found)


def test_a_fork_goes_on_by_itself():
    model, ids = build("v3"), families.some_ids()
    cache = LatentCache.of(model)
    steps(model, cache, ids[:, :6])
    fork = cache.fork()
    other = steps(model, fork, ids[:, 6:10].flip(1))
    assert torch.equal(steps(model, cache, ids[:, 6:10]), steps(model, LatentCache.of(model), ids[:, :10])[:, 6:])
    assert not torch.equal(other, steps(model, fork, ids[:, :4]))
    assert (cache.get_seq_length(), fork.get_seq_length()) == (10, 14)


def test_a_step_writes_in_place_until_there_is_no_more_room():
    model, ids = build("v3"), families.some_ids()
    cache, places = LatentCache.of(model, tokens=4), []
    for i in range(10):
        steps(model, cache, ids[:, i : i + 1])
        places.append([tensor.data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values)])
    assert places[0] == places[3]
    assert places[3] != places[4]  # room for 9 now
    assert places[4] == places[8]


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(("search", "layers"), [("greedy", 1), pytest.param("beams", 2, marks=pytest.mark.slow)])
def test_compiled_generation_is_eagers_however_far_it_grows(search, layers):
    model, inputs = build("v3", layers=layers), prompt(2, padded=True)
    more = SEARCHES[search] | {"max_new_tokens": 30, "min_new_tokens": 30}
    expected = generate(model, inputs, None, more)
    model.compile(backend="mla", fullgraph=True)
    assert torch.equal(generate(model, inputs, LatentCache.of(model), more), expected)
    reports = mla_compile.reports()
    assert all(report.rewritten == layers for report in reports)
    assert len(reports) <= 5 + (search == "beams")
    assert any(site.path == "absorbed" for site in reports[-1].sites)


def test_only_models_of_transformers_have_one():
    with pytest.raises(CacheMismatchError, match="expected a transformers model with a config, found Linear"):
        LatentCache.of(torch.nn.Linear(2, 2))


def test_tokens_to_remove_are_counted_below_zero():
    cache = LatentCache.of(build("v3"))
    with pytest.raises(CacheMismatchError, match="expected a negative number of tokens to remove, found 3"):
        cache.crop(3)


def layer_by_layer(cache, layers, batch=2):
    for layer in layers:
        cache.update(torch.randn(batch, 1, 1, 16), torch.randn(batch, 1, 1, 8), layer)


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([(0, 1), (0,), (0, 1)], "tokens of layer 1 in each step, found that it lacks the last 1"),
        ([(0,), (0, 1)], "the 2 tokens that layer 1 lacks, found 1"),
        ([(0, 0, 1)], "the 2 tokens that layer 1 lacks, found 1"),
    ],
)
def test_every_layer_takes_part_in_every_step(steps, found):
    """A `DynamicCache` counts each layer's tokens. Here rows that no layer has written would be read."""
    cache = LatentCache.of(build("v3"))
    *right, wrong = steps
    for layers in right:
        layer_by_layer(cache, layers)
    with pytest.raises(CacheMismatchError, match=found):
        layer_by_layer(cache, wrong)


def test_layers_may_come_in_another_order():
    cache = LatentCache.of(build("v3"))
    for layers in ((0, 1), (1, 0), (0, 1)):
        layer_by_layer(cache, layers)
    assert cache.get_seq_length() == 3


def test_another_batch_is_refused_until_it_is_reset():
    cache = LatentCache.of(build("v3"))
    layer_by_layer(cache, (0, 1))
    cache.crop(-1)
    with pytest.raises(CacheMismatchError, match=r"expected tokens of shape \[2, 1, 'S', 16\], found \[1, 1, 1, 16\]"):
        layer_by_layer(cache, (0, 1), batch=1)
    cache.reset()
    layer_by_layer(cache, (0, 1), batch=1)
    assert cache.get_seq_length() == 1


def test_each_layer_has_as_many_tokens_in_a_step():
    cache = LatentCache.of(build("v3"))
    layer_by_layer(cache, (0, 1))
    layer_by_layer(cache, (0,))
    for count in (0, 2):
        with pytest.raises(CacheMismatchError, match=f"the 1 tokens that layer 1 lacks, found {count}"):
            cache.update(torch.ones(2, 1, count, 16), torch.ones(2, 1, count, 8), 1)
    layer_by_layer(cache, (1, 0, 1))
    assert [layer.get_seq_length() for layer in cache.layers] == [3, 3]


def test_a_layer_that_is_cropped_alone_has_fewer_tokens_and_the_next_step_says_so():
    cache = LatentCache.of(build("v3"))
    for _ in range(4):
        layer_by_layer(cache, (0, 1))
    kept = [layer.keys.clone() for layer in cache.layers]
    cache.layers[1].crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [4, 1]
    assert torch.equal(cache.layers[1].keys, kept[1][:, :, :1])
    with pytest.raises(CacheMismatchError, match="tokens of layer 1 in each step, found that it lacks the last 3"):
        layer_by_layer(cache, (0, 1))
    cache.layers[0].crop(-3)
    layer_by_layer(cache, (0, 1))
    assert all(
        torch.equal(layer.keys[:, :, :1], keys[:, :, :1]) for layer, keys in zip(cache.layers, kept, strict=True)
    )
    assert cache.get_seq_length() == 2


def test_tokens_that_are_refused_change_nothing():
    cache = LatentCache.of(build("v3", layers=1))
    layer_by_layer(cache, (0,))
    keys = cache.layers[0].keys.clone()
    for latent, rope in (((1, 16), (1, 8)), ((2, 16), (2, 4)), ((2, 8), (2, 8))):
        with pytest.raises(CacheMismatchError, match="expected tokens of shape"):
            cache.update(torch.ones(latent[0], 1, 1, latent[1]), torch.ones(rope[0], 1, 1, rope[1]), 0)
    assert torch.equal(cache.layers[0].keys, keys)
    layer_by_layer(cache, (0,))
    assert torch.equal(cache.layers[0].keys[:, :, :1], keys)
    assert cache.get_seq_length() == 2


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32", "bfloat16"), ("float32", "float64", "float32")])
def test_tokens_of_a_wider_dtype_keep_their_digits(dtypes):
    model = build("v3", layers=1)
    caches = transformers.DynamicCache(config=model.config), LatentCache.of(model, tokens=8)
    for dtype in dtypes:
        latent, rope = (torch.randn(2, 1, 3, width, dtype=getattr(torch, dtype)) for width in (16, 8))
        expected, found = (cache.update(latent, rope, 0) for cache in caches)
        for wanted, tensor in zip(expected, found, strict=True):
            assert tensor.dtype == wanted.dtype
            assert torch.equal(tensor, wanted)


def test_keys_that_are_set_are_as_many_as_before():
    cache = LatentCache.of(build("v3"))
    layer_by_layer(cache, (0, 1))
    layer = cache.layers[0]
    layer.keys = 2 * layer.keys
    with pytest.raises(CacheMismatchError, match="expected the 1 tokens of layer 0, found 2"):
        layer.keys = layer.keys.repeat(1, 1, 2, 1)


class Step(torch.nn.Module):
    """A model as a function of tokens and of a cache before them, for export."""

    def __init__(self, model, tokens):
        super().__init__()
        self.model, self.tokens = model, tokens

    def forward(self, ids, latent, k_rope):
        cache = LatentCache.of(self.model, tokens=self.tokens)
        cache.update(latent, k_rope, 0)
        logits = self.model(ids, past_key_values=cache).logits
        return logits, *(getattr(cache.layers[0], name) for name in ("keys", "values"))


@pytest.mark.parametrize("tokens", [0, 20, 100], ids=["no room", "room for some", "room for all"])
def test_a_program_with_it_serves_all_sizes(tokens):
    """A package of AOTInductor checks no guards, so that there may be none on where the cache grows."""
    model = build("v3", layers=1)
    step, room = Step(model, tokens), {2: torch.export.Dim("T", min=0, max=40)}

    def sizes(queries, before):
        return torch.randint(64, (1, queries)), torch.randn(1, 1, before, 16), torch.randn(1, 1, before, 8)

    with torch.no_grad():
        dims = {1: torch.export.Dim("S", min=1, max=30)}, room, room
        run = torch.export.export(step, sizes(5, 7), dynamic_shapes=dims).module()
        for each in (sizes(1, 9), sizes(3, 40), sizes(6, 3), sizes(30, 0)):
            torch.testing.assert_close(run(*each), step(*each))
