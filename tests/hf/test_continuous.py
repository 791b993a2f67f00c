"""transformers' continuous batching over latents: each request gets the tokens that it would get alone."""

import pytest
import torch

import mla_compile
from mla_compile import ContinuousModel
from mla_compile.cache import continuous
from tests.hf import families
from tests.hf.test_generate import CHECKPOINT, load

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(
    not hasattr(transformers.ContinuousBatchingConfig, "page_size"),
    reason="the engine of transformers before 5.19 cannot be told its page size",
)

REQUESTS = 32
CANCELLED = "cancelled"


@pytest.fixture(scope="module")
def model():
    return load(layers=2)


@pytest.fixture(scope="module")
def requests():
    """Prompts of 3 to 66 tokens, each with 4 to 24 tokens to write."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    tokens = tokenizer((CHECKPOINT.parent / "train_tiny.py").read_text()).input_ids
    return {str(i): (tokens[11 * i : 11 * i + 3 + 37 * i % 64], 4 + 13 * i % 21) for i in range(REQUESTS)}


@pytest.fixture(scope="module")
def one_by_one(model, requests):
    return write_one_by_one(model, requests)


def write_one_by_one(model, requests):
    expected = {}
    with torch.no_grad():
        for name, (prompt, count) in requests.items():
            ids = torch.tensor([prompt])
            options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
            expected[name] = model.generate(ids, max_new_tokens=count, **options)[0, len(prompt) :].tolist()
    return expected


def configs(**more):
    batching = transformers.ContinuousBatchingConfig(max_batch_tokens=64, max_requests_per_batch=24, **more)
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=1)
    return {"generation_config": generation, "continuous_batching_config": batching}


def serve(model, requests, together, **more):
    """The tokens of each request. `together` of them begin at once, and the others join as these leave."""
    waiting, results = list(requests.items()), {}

    def add(count):
        for name, (prompt, tokens) in [waiting.pop(0) for _ in range(min(count, len(waiting)))]:
            manager.add_request(prompt, request_id=name, max_new_tokens=tokens)

    with model.continuous_batching_context_manager(**configs(**more)) as manager:
        manager.add_request([5, 6, 7], request_id=CANCELLED, max_new_tokens=150)
        add(together)
        while len(results) < len(requests):
            result = manager.get_result(timeout=1)
            assert manager.is_running()
            if result is None:
                continue
            assert result.error is None
            results[result.request_id] = result.generated_tokens
            add(2)
            if len(results) == 5:
                manager.cancel_request(CANCELLED)
    return results


def test_requests_join_leave_wait_and_are_cancelled(model, requests, one_by_one):
    """In a pool that has room for a fifth of them."""
    pages = [-(-(len(prompt) + count) // 8) for prompt, count in requests.values()]
    assert sum(pages) > 5 * 40
    batched = ContinuousModel(model, pages=40, page_size=8)
    assert serve(batched, requests, together=20) == one_by_one
    assert serve(batched, dict(list(requests.items())[:3]), together=3) == {n: one_by_one[n] for n in "012"}


def test_a_page_that_the_engine_does_not_take_is_refused(model):
    with pytest.raises(mla_compile.CacheMismatchError, match="expected a page_size of at least 4"):
        ContinuousModel(model, pages=8, page_size=2)


def test_pages_of_which_the_engine_allocates_several_at_once(model):
    """A page of 4 tokens takes 64 bytes of the engine's own cache, which it allocates by 128 bytes."""
    short = {str(i): ([5 + i, 6, 7][: 1 + i % 3], 8) for i in range(6)}
    assert model.config.num_hidden_layers * model.dtype.itemsize == 8
    assert serve(ContinuousModel(model, pages=41, page_size=4), short, together=6) == write_one_by_one(model, short)


def test_what_an_earlier_request_left_is_not_read(model):
    """Attention multiplies what is behind the last token by 0, which NaN survives."""
    batched = ContinuousModel(model, pages=2, page_size=8)
    batched.pool.layers[0].fill_(float("nan"))
    short = {"a": ([5, 6, 7], 4)}
    assert serve(batched, short, together=1) == write_one_by_one(model, short)


def test_requests_that_wait_go_on_when_those_that_run_are_cancelled(model):
    """Two that do not fit together: the engine puts one back, and the other one is cancelled before it finishes."""
    batched = ContinuousModel(model, pages=16, page_size=4)
    step, put_back = batched._step, []

    def cancel_when_one_is_put_back(**given):
        scheduler = manager.batch_processor.scheduler
        if scheduler.block_new_requests and not put_back:
            put_back.extend(scheduler.waiting_requests)
            for name in scheduler.active_requests:
                manager.cancel_request(name)
        return step(**given)

    batched._step = cancel_when_one_is_put_back
    with batched.continuous_batching_context_manager(**configs(allow_block_sharing=False)) as manager:
        for name in "ab":
            manager.add_request([5, 6, 7], request_id=name, max_new_tokens=40)
        result = manager.get_result(timeout=60)
        for name in "ab":  # those that would wait forever
            manager.cancel_request(name)
    assert result is not None
    assert ([result.request_id], len(result.generated_tokens)) == (put_back, 40)


def test_generate_batch_writes_what_generate_does(model, requests, one_by_one):
    prompts = {name: prompt for name, (prompt, _) in list(requests.items())[:6]}
    outputs = ContinuousModel(model, pages=64, page_size=16).generate_batch(
        list(prompts.values()), max_new_tokens=4, **configs()
    )
    for name, output in zip(prompts, outputs.values(), strict=True):
        assert output.generated_tokens == one_by_one[name][:4]


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, pytest.param(torch.int8, marks=pytest.mark.slow)], ids=["FP8", "INT8"]
)
def test_in_few_bits_it_writes_what_generate_does_in_few_bits(model, requests, dtype):
    prompts = [requests[name][0] for name in "123"]
    batched = ContinuousModel(model, pages=64, page_size=16, dtype=dtype)
    outputs = batched.generate_batch(prompts, max_new_tokens=6, **configs())
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        ids, cache = torch.tensor([prompt]), mla_compile.PagedLatentCache.of(model, pages=64, page_size=16, dtype=dtype)
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
        alone = model.generate(ids, max_new_tokens=6, past_key_values=cache, **options)
        assert output.generated_tokens == alone[0, len(prompt) :].tolist()


def assert_compiled_as_eager(model, requests, expected, most, *fields, page_size=8):
    config = transformers.CompileConfig(backend="mla", mode="default", dynamic=True, fullgraph=True)
    batched = ContinuousModel(model, pages=512 // page_size, page_size=page_size)
    assert serve(batched, requests, together=6, **dict.fromkeys(fields, config)) == expected
    reports = mla_compile.reports()
    assert 1 <= len(reports) <= most
    assert all(report.rewritten == model.config.num_hidden_layers for report in reports)
    reasons = [site.reason for report in reports for site in report.sites if site.mask == "lengths"]
    assert reasons
    assert all(reason.endswith("reads the pages") for reason in reasons)


@pytest.mark.usefixtures("without_codegen")
def test_compiled_decoding_writes_the_same(requests):
    """Two compilations: of one request, and of several, whether all fit into one page or not."""
    model, some = load(layers=1), {str(i): requests[str(i)] for i in range(12)}
    assert_compiled_as_eager(model, some, write_one_by_one(model, some), 2, "decode_compile_config", page_size=64)


@pytest.mark.slow
def test_all_steps_of_the_whole_checkpoint_compiled_write_the_same(requests):
    """Up to three more compilations, for rows of prompt tokens: all keys new, or not; few queries, or many."""
    model = load()
    expected = write_one_by_one(model, requests)
    assert_compiled_as_eager(model, requests, expected, 5, "decode_compile_config", "varlen_compile_config")


@pytest.mark.parametrize(
    ("generation", "batching", "message"),
    [
        ({"num_return_sequences": 2, "do_sample": True}, {}, "expected one sequence per request, found 2"),
        ({}, {"cpu_offload_space": 1.0}, "expected no cpu_offload_space, found 1.0 GiB"),
        ({"num_beams": 4}, {}, "expected one beam per request, found num_beams=4: the engine searches none"),
    ],
)
def test_what_the_engine_would_do_with_its_own_cache_is_refused(model, generation, batching, message):
    batched = ContinuousModel(model, pages=8, page_size=8)
    with pytest.raises(mla_compile.CacheMismatchError, match=message):
        batched.init_continuous_batching(
            transformers.GenerationConfig(**generation), transformers.ContinuousBatchingConfig(**batching)
        )


def test_requests_that_the_engine_would_answer_with_another_are_refused(model):
    batched = ContinuousModel(model, pages=8, page_size=8)
    with pytest.raises(mla_compile.CacheMismatchError, match="expected a token or more in each request, found none in"):
        batched.generate_batch([[5], []], max_new_tokens=2)
    with pytest.raises(mla_compile.CacheMismatchError, match="expected one beam per request, found num_beams=2"):
        batched.generate_batch([[5]], max_new_tokens=2, num_beams=2)
    manager = batched.init_continuous_batching()
    with pytest.raises(mla_compile.CacheMismatchError, match="found none in request 0"):
        manager.add_request([])


def test_attention_that_takes_no_masks_is_refused(model, monkeypatch):
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(mla_compile.CacheMismatchError, match="with sdpa or eager attention, found flash_attention_2"):
        ContinuousModel(model, pages=8)


def test_the_engines_own_cache_has_no_room_for_mla(model, requests):
    """This is why there is `ContinuousModel`. If it fails, transformers may not need that any more."""
    outputs = model.generate_batch([requests["0"][0]], max_new_tokens=2, **configs(num_blocks=16, page_size=16))
    assert [output.generated_tokens for output in outputs.values()] == [[]]
    assert "must have same slice shapes" in next(iter(outputs.values())).error


def test_what_is_called_instead_is_said(model):
    engine = ContinuousModel(model, pages=4, page_size=16)
    with pytest.raises(
        mla_compile.CacheError, match="expected a request to the engine, found a call of generate; call generate_batch"
    ):
        engine.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2)
    with pytest.raises(mla_compile.CacheError, match="expected a step of the engine, found a call of the model; call"):
        engine(torch.ones(1, 3, dtype=torch.int64))
    with pytest.raises(mla_compile.CacheMismatchError, match="expected pages to be a whole number, found '4'"):
        ContinuousModel(model, pages="4")


def test_an_indexers_keys_are_not_paged():
    model = families.build(families.FAMILIES["deepseek_v32"], "sdpa")
    with pytest.raises(mla_compile.CacheMismatchError, match=r"nothing else, found .* have a DynamicIndexedLayer"):
        mla_compile.ContinuousModel(model, pages=4)


def test_an_engine_that_cannot_be_told_its_page_size(model, monkeypatch):
    """As the engine of transformers before 5.19."""
    monkeypatch.setattr(continuous, "fields", lambda _: [])
    monkeypatch.setattr(transformers, "__version__", "5.18.0")
    with pytest.raises(mla_compile.CacheError, match=r"needs transformers 5\.19 or later, found 5\.18\.0"):
        ContinuousModel(model, pages=4)
