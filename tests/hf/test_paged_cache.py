"""`generate` with pages gives what it gives with transformers' own cache: eager and compiled, however it searches."""

import pytest
import torch

import mla_compile
from mla_compile import PagedLatentCache
from mla_compile.int4 import groups_of
from tests.errors import assert_as_close_as_eager
from tests.hf import families
from tests.hf.test_deepseek import SIZES, build

transformers = pytest.importorskip("transformers")

OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
SEARCHES = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "sampling beams": {"num_beams": 3, "do_sample": True},
    "sampling several": {"num_return_sequences": 3, "do_sample": True},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 4},
}


def prompt(batch, padded=False):
    ids = torch.randint(1, SIZES["vocab_size"], (batch, 9)).repeat_interleave(2, dim=1)[:, :9]  # for lookup to find
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, cache, more):
    torch.manual_seed(1)
    return model.generate(**inputs, **(OPTIONS | more), past_key_values=cache)


@pytest.mark.parametrize("search", SEARCHES)
def test_generation_is_that_with_a_dynamic_cache_and_gives_its_pages_back(search):
    model = build("v3")
    inputs = prompt(1 if search == "lookup" else 2, padded=search != "lookup")
    expected = generate(model, inputs, transformers.DynamicCache(config=model.config), SEARCHES[search])
    cache = PagedLatentCache.of(model, pages=96, page_size=4)
    assert torch.equal(generate(model, inputs, cache, SEARCHES[search]), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1
    cache.reset()
    assert cache.pool.available == 96


def test_an_assistant_writes_for_it():
    model, inputs = build("v2"), prompt(1)
    more = {"assistant_model": model}
    expected = generate(model, inputs, None, {})
    cache = PagedLatentCache.of(model, pages=96, page_size=4)
    assert torch.equal(generate(model, inputs, cache, more), expected)


def test_generation_goes_on_from_a_forked_prompt():
    model, inputs = build("v3"), prompt(1)
    cache = PagedLatentCache.of(model, pages=96, page_size=4)
    model(**{name: tensor[:, :-1] for name, tensor in inputs.items()}, past_key_values=cache)
    for length in (12, 6):
        fork = cache.fork()
        more = {"max_new_tokens": length, "min_new_tokens": length}
        assert torch.equal(generate(model, inputs, fork, more), generate(model, inputs, None, more))
        fork.reset()
    assert cache.get_seq_length() == 8


def test_no_pages_left_is_an_error_and_what_others_wrote_stays():
    model, inputs = build("v3"), prompt(1)
    kept = PagedLatentCache.of(model, pages=7, page_size=4)
    model(**inputs, past_key_values=kept)
    before = [kept.table.read(layer) for layer in range(2)]
    other = PagedLatentCache(kept.pool)
    with pytest.raises(mla_compile.OutOfPagesError, match="expected 1 free pages, found 0 of 7"):
        generate(model, inputs, other, {})
    for layer, tokens in enumerate(before):
        assert torch.equal(kept.table.read(layer), tokens)
    other.reset()
    assert kept.pool.available == 4


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.slow
@pytest.mark.parametrize("search", ["beams", "lookup"])
def test_compiled_generation_is_eagers_in_few_compilations_and_one_graph(search):
    model, inputs = build("v3", layers=1), prompt(1 if search == "lookup" else 2, padded=search != "lookup")
    expected = generate(model, inputs, None, SEARCHES[search])
    assert_compiled_generates(model, inputs, SEARCHES[search], expected, {})


CODED = {
    "FP8": {"dtype": torch.float8_e4m3fn},
    "FP8 of one scale": {"dtype": torch.float8_e4m3fn, "scale": 0.01},
    "INT8": {"dtype": torch.int8},
    "INT4": {"dtype": torch.int4},
}


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(
    ("search", "kind"),
    [
        pytest.param("greedy", "FP8 of one scale", marks=pytest.mark.slow),  # one in test_fixed_pages.py
        pytest.param("beams", "FP8", marks=pytest.mark.slow),  # beams have a test above, FP8 one in test_fixed_pages.py
        pytest.param("greedy", "INT8", marks=pytest.mark.slow),  # its logits have one below
        pytest.param("greedy", "INT4", marks=pytest.mark.slow),  # likewise
    ],
)
def test_compiled_generation_in_few_bits_is_eagers(search, kind):
    model, inputs = build("v3", layers=1), prompt(2, padded=True)
    cache = PagedLatentCache.of(model, pages=96, page_size=4, **CODED[kind])
    expected = generate(model, inputs, cache, SEARCHES[search])
    assert_compiled_generates(model, inputs, SEARCHES[search], expected, CODED[kind])


def assert_compiled_generates(model, inputs, more, expected, kind):
    model.compile(backend="mla", fullgraph=True)
    cache = PagedLatentCache.of(model, pages=96, page_size=4, **kind)
    assert torch.equal(generate(model, inputs, cache, more), expected)
    cache.reset()
    assert cache.pool.available == 96
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(mla_compile.reports()) <= 4
    assert all(report.rewritten == model.config.num_hidden_layers for report in mla_compile.reports())
    sites = [site for report in mla_compile.reports() for site in report.sites]
    decodes = [site for site in sites if site.path == "absorbed"]
    assert decodes
    assert all(site.reason.endswith("reads the pages") for site in decodes)


@pytest.mark.usefixtures("without_codegen")
def test_sizes_may_be_symbols_from_the_first_call_on():
    model, ids = build("v3", layers=1), prompt(2)["input_ids"]
    expected = model(ids).logits
    model.compile(backend="mla", dynamic=True, fullgraph=True)
    cache = PagedLatentCache.of(model, pages=8, page_size=4)
    logits = [model(part, past_key_values=cache).logits for part in ids.split([5, 3, 1], dim=1)]
    torch.testing.assert_close(torch.cat(logits, 1), expected)
    assert all("reads the pages" in site.reason for report in mla_compile.reports() for site in report.sites)


@pytest.mark.usefixtures("without_codegen")
def test_compiled_code_that_runs_out_of_pages_says_so_and_stays_compiled():
    model, inputs = build("v3", layers=1), prompt(1)
    expected = generate(model, inputs, None, {})
    model.compile(backend="mla", fullgraph=True)
    cache = PagedLatentCache.of(model, pages=4, page_size=4)
    with pytest.raises(mla_compile.OutOfPagesError, match="expected 1 free pages, found 0 of 4"):
        generate(model, inputs, cache, {})
    assert cache.get_seq_length() == 16
    assert cache.pool.available == 0
    cache.reset()
    assert cache.pool.available == 4
    fewer = {"max_new_tokens": 7, "min_new_tokens": 7}
    assert torch.equal(generate(model, inputs, cache, fewer), expected[:, : 9 + 7])
    assert [report.rewritten for report in mla_compile.reports()] == [1, 1, 1]


class Rounded(mla_compile.PagePool):
    """Latents with the largest errors of rounding, up or down at random: half of the last of the 3 bits of e4m3, half
    of 1/127 of a token's greatest magnitude in int8, or half of 1/7 of that of a group of columns in int4."""

    coded = torch.float8_e4m3fn

    def _put(self, layer, place, tokens):
        latent, k_rope = tokens.split([self.latent_width, self.rope_width], dim=-1)
        groups = latent.unflatten(-1, (groups_of(self.latent_width), -1)).abs().amax(-1)
        half = {
            torch.float8_e4m3fn: 2.0**-4 * latent,
            torch.int8: latent.abs().amax(-1, keepdim=True) / 254,
            torch.int4: groups.repeat_interleave(self.latent_width // groups.shape[-1], -1) / 14,
        }[self.coded]
        off = half * (2 * torch.randint(2, latent.shape) - 1)
        super()._put(layer, place, torch.cat([latent + off, k_rope], dim=-1))


@pytest.mark.parametrize("coded", [torch.float8_e4m3fn, torch.int8, torch.int4], ids=["FP8", "INT8", "INT4"])
def test_logits_in_few_bits_are_as_near_as_these_are(monkeypatch, coded):
    """They are no further from unrounded logits than the worst of eight random roundings."""
    monkeypatch.setattr(Rounded, "coded", coded)
    model, inputs = build("v3"), prompt(2)
    plain = PagedLatentCache.of(model, pages=96, page_size=4)

    def logits(cache):
        return model(**inputs, past_key_values=cache).logits

    exact = logits(plain)
    error = (logits(PagedLatentCache.of(model, pages=96, page_size=4, dtype=coded)) - exact).norm()
    sizes = 2, plain.pool.latent_width, plain.pool.rope_width, 96, 4
    bound = max((logits(PagedLatentCache(Rounded(*sizes))) - exact).norm() for _ in range(8))
    print(
        f"logits over {coded} are off by {error / exact.norm():.1e}, where rounding explains {bound / exact.norm():.1e}"
    )
    assert 0 < error <= bound


@pytest.mark.parametrize(
    ("family", "more", "layers"),
    [
        ("glm5_next", {}, "LinearAttentionLayer"),
        ("kimi_linear", {"batch": 1, "tokens": 8}, "LinearAttentionLayer"),
        ("dots3_note", {"mesh": object()}, "DynamicIndexedLayer and a DynamicSlidingWindowLayer"),
    ],
)
def test_layers_that_keep_something_else_are_named(family, more, layers):
    model = families.build(families.FAMILIES[family], "sdpa")
    with pytest.raises(
        mla_compile.CacheMismatchError, match=f"expected layers that cache a latent .* have a {layers}: let"
    ):
        mla_compile.PagedLatentCache.of(model, pages=4, **more)


MIXED = ("kimi_linear", "bailing_hybrid", "dots3_note")
"""Families of which some layers keep a state or a window, and no latents in pages."""


@pytest.mark.parametrize("search", ["greedy", "beams", "sampling several"])
@pytest.mark.parametrize("family", MIXED)
def test_states_and_windows_are_kept_beside_the_pages(family, search):
    model = families.build(families.FAMILIES[family], "sdpa")
    inputs = prompt(2)
    expected = generate(model, inputs, None, SEARCHES[search])
    cache = PagedLatentCache.of(model, pages=96, page_size=4)
    assert len(cache.pool.layers) == 1 < len(cache) == model.config.num_hidden_layers
    for _ in range(2):
        assert torch.equal(generate(model, inputs, cache, SEARCHES[search]), expected)
        cache.reset()
        assert cache.pool.available == 96


@pytest.mark.parametrize(("family", "cropped"), [*((family, 0) for family in MIXED), ("deepseek_v32", 5)])
def test_a_fork_has_what_is_beside_the_pages_of_its_own(family, cropped):
    """States, windows and an indexer's keys. The last are cropped before the fork."""
    model = families.build(families.FAMILIES[family], "sdpa")
    ids, more = prompt(2)["input_ids"], torch.randint(1, 60, (2, max(cropped, 1)))
    whole = torch.cat([ids, more], dim=1)
    eager, exact = (each(whole).logits[:, ids.shape[1] :] for each in (model, families.exact(model)))
    cache = PagedLatentCache.of(model, pages=96, page_size=4)
    model(torch.cat([ids, more.flip(1)[:, :cropped]], dim=1), past_key_values=cache)
    if cropped:
        cache.crop(-cropped)
    last = torch.tensor([1])
    for continued, rows in ((cache.fork(), [0, 1]), (cache.fork(last), [1]), (cache, [0, 1])):
        logits = model(more[rows], past_key_values=continued).logits
        assert_as_close_as_eager(logits, eager[rows], exact[rows])


@pytest.mark.parametrize("family", [*MIXED, "deepseek_v3"])
def test_a_step_without_pages_can_be_repeated(family):
    """Layers before the first one in pages have not moved on: in a first step as in a later one."""
    model = families.build(families.FAMILIES[family], "sdpa")
    ids = torch.randint(1, 60, (2, 12))
    expected = transformers.DynamicCache(config=model.config)
    logits = [model(part, past_key_values=expected).logits for part in ids.split([8, 4], dim=1)]
    cache = PagedLatentCache.of(model, pages=12, page_size=2)
    others = [cache.fork() for _ in range(3)]
    for other, count in zip(others, (8, 2, 2), strict=True):
        model(ids[:, :count], past_key_values=other)
    for part, later, other in zip(ids.split([8, 4], dim=1), logits, (others[0], others[1]), strict=True):
        before = int(cache.get_seq_length()), cache.pool.available
        with pytest.raises(mla_compile.OutOfPagesError):
            model(part, past_key_values=cache)
        assert (int(cache.get_seq_length()), cache.pool.available) == before
        other.reset()
        if other is others[1]:
            others[2].reset()
        torch.testing.assert_close(model(part, past_key_values=cache).logits, later)


@pytest.mark.parametrize("family", MIXED)
def test_a_crop_that_cannot_be_changes_nothing(family):
    model = families.build(families.FAMILIES[family], "sdpa")
    ids = torch.randint(1, 60, (2, 6))
    logits = []
    for fails in (False, True):
        cache = PagedLatentCache.of(model, pages=12, page_size=2)
        cache.activate_past_recording()
        model(ids[:, :5], past_key_values=cache)
        if fails:
            with pytest.raises(mla_compile.CacheMismatchError, match="expected a length from 0 to 5, found -1"):
                cache.crop(-6)
        logits.append(model(ids[:, 5:], past_key_values=cache).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=str)
def test_layers_without_rope_are_in_pages_too(dtype):
    """One of two layers has no rope keys, and the pool has room for those of the other."""
    model = families.build(families.FAMILIES["mistral_large4"], "sdpa")
    ids = prompt(2, padded=True)
    cache = PagedLatentCache.of(model, pages=64, page_size=4, dtype=dtype)
    tokens = generate(model, ids, cache, {})
    if dtype is None:
        assert torch.equal(tokens, generate(model, ids, None, {}))
    assert cache.get_seq_length() == tokens.shape[1] - 1


def test_a_window_is_cropped_with_the_pages_where_it_was_recorded():
    model = families.build(families.FAMILIES["dots3_note"], "sdpa")
    ids, more = prompt(2)["input_ids"], torch.randint(1, 60, (2, 3))
    logits = []
    for cache in (transformers.DynamicCache(config=model.config), PagedLatentCache.of(model, pages=96, page_size=4)):
        cache.activate_past_recording()
        model(ids, past_key_values=cache)
        model(more.flip(1), past_key_values=cache)
        cache.crop(-3)
        logits.append(model(more, past_key_values=cache).logits)
    assert torch.equal(*logits)


@pytest.mark.slow
@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("family", ["kimi_linear", "dots3_note"])
def test_compiled_generation_beside_states_and_windows_is_eagers(family):
    model = families.build(families.FAMILIES[family], "sdpa")
    inputs = prompt(2)
    expected = generate(model, inputs, None, {})
    model.compile(backend="mla")
    cache = PagedLatentCache.of(model, pages=96, page_size=4)
    assert torch.equal(generate(model, inputs, cache, {}), expected)
    sites = [site for report in mla_compile.reports() for site in report.sites]
    assert sites
    assert any(site.rewritten for site in sites)


@pytest.mark.parametrize("search", ["greedy", "beams", "sampling several"])
def test_an_indexers_keys_are_kept_beside_the_pages(search):
    model = families.build(families.FAMILIES["deepseek_v32"], "sdpa")
    inputs = prompt(2)
    expected = generate(model, inputs, None, SEARCHES[search])
    cache = PagedLatentCache.of(model, pages=96, page_size=4)
    assert torch.equal(generate(model, inputs, cache, SEARCHES[search]), expected)
    cache.reset()
    assert cache.pool.available == 96


def test_an_indexers_keys_are_not_shared_out_over_a_mesh():
    model = families.build(families.FAMILIES["deepseek_v32"], "sdpa")
    with pytest.raises(mla_compile.CacheMismatchError, match="have a DynamicIndexedLayer: let"):
        mla_compile.PagedLatentCache.of(model, pages=4, mesh=object())  # refused before it is used


@pytest.mark.slow
@pytest.mark.usefixtures("without_codegen")
def test_compiled_generation_with_an_indexer_is_eagers():
    model = families.build(families.FAMILIES["deepseek_v32"], "sdpa")
    inputs = prompt(2)
    expected = generate(model, inputs, None, {})
    model.compile(backend="mla")
    cache = PagedLatentCache.of(model, pages=96, page_size=4)
    assert torch.equal(generate(model, inputs, cache, {}), expected)
    sites = [site for report in mla_compile.reports() for site in report.sites]
    assert sites
    assert all(site.rewritten for site in sites)


@pytest.mark.usefixtures("without_codegen")
def test_under_autocast_rope_keys_may_be_narrower_than_latents():
    """DeepSeek-V2 casts rope keys back to the dtype of the products."""
    model = build("v2", layers=1)
    ids = prompt(2)["input_ids"]
    compiled = torch.compile(model, backend="mla", fullgraph=True)

    def steps(run, cache):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.cat([run(part, past_key_values=cache).logits for part in ids.split([7, 2], 1)], 1)

    eager = steps(model, transformers.DynamicCache(config=model.config))
    found = steps(compiled, PagedLatentCache.of(model, pages=8, page_size=4))
    assert mla_compile.last_report().rewritten == 1
    exact = model.double()(ids).logits
    assert_as_close_as_eager(found, eager, exact)
