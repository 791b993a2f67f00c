"""`generate` of the shipped checkpoint in the ways people call it: compiled, tokens are eager's, compilations are few.

The numbers of compilations are those of `docs/generate.md`. The default run takes the first layer or two and runs the
graphs without generating code; `-m slow` takes the whole checkpoint, Inductor's code, and the ways that compile
longest.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

import mla_compile

transformers = pytest.importorskip("transformers")

CHECKPOINT = Path(__file__).parents[2] / "examples" / "tiny-deepseek-v3"
PROMPT = "import os\n\ndef read_file(path):\n"
LONGER = "class Tree:\n    def __init__(self, left, right, value):\n        self.left = left\n"
TOKENS = 40


@dataclass(frozen=True)
class Way:
    """One way to call `generate`, and the most compilations that it takes in a fresh process."""

    most: int
    options: dict = field(default_factory=dict)
    prompts: tuple[str, ...] = (PROMPT,)


def in_pages(model, **kind):
    return mla_compile.PagedLatentCache.of(model, pages=64, page_size=4, **kind)


WAYS = {
    "greedy": Way(3),
    "sampling": Way(3, {"do_sample": True, "temperature": 0.8}),
    "beams": Way(3, {"num_beams": 3}),
    "left padding": Way(3, prompts=(PROMPT, LONGER)),
    "static": Way(2, {"cache_implementation": "static", "disable_compile": True}),
    "prompt lookup": Way(6, {"prompt_lookup_num_tokens": 3}),
    "assistant": Way(6, {"assistant_model": True}),
    "in place": Way(5, {"past_key_values": mla_compile.LatentCache.of}),
    "pages": Way(3, {"past_key_values": in_pages}),
    "FP8 pages": Way(3, {"past_key_values": partial(in_pages, dtype=torch.float8_e4m3fn)}),
}


def load(layers=5, dtype=torch.float32):
    """The checkpoint, or its first layers."""
    config = transformers.AutoConfig.from_pretrained(CHECKPOINT)
    whole = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=dtype)
    if layers == config.num_hidden_layers:
        return whole
    config.num_hidden_layers = layers
    model = transformers.DeepseekV3ForCausalLM(config).to(dtype).eval()
    missing = model.load_state_dict(whole.state_dict(), strict=False).missing_keys
    assert not missing
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(CHECKPOINT, padding_side="left")


def generate(model, tokenizer, way, tokens=TOKENS, **more):
    torch.manual_seed(1)
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False} | way.options | more
    if options.get("assistant_model"):
        options["assistant_model"] = load(layers=1, dtype=model.dtype)
    if "past_key_values" in options:
        options["past_key_values"] = options["past_key_values"](model)
    return model.generate(**tokenizer(list(way.prompts), return_tensors="pt", padding=True), **options)


def assert_all_rewritten(model, most):
    reports = mla_compile.reports()
    assert 1 <= len(reports) <= most
    assert all(report.rewritten == model.config.num_hidden_layers for report in reports)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("name", ["left padding", "static"])
def test_compiled_tokens_are_eagers(name, tokenizer):
    model, way = load(layers=1), WAYS[name]
    expected = generate(model, tokenizer, way)
    model.compile(backend="mla")
    assert torch.equal(generate(model, tokenizer, way), expected)
    assert_all_rewritten(model, way.most)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_compiled_tokens_of_the_whole_checkpoint_are_eagers(name, tokenizer):
    model, way = load(), WAYS[name]
    expected = generate(model, tokenizer, way, tokens=100)
    model.compile(backend="mla")
    assert torch.equal(generate(model, tokenizer, way, tokens=100), expected)
    assert_all_rewritten(model, way.most)


@pytest.mark.usefixtures("without_codegen")
def test_what_is_compiled_for_one_call_serves_sampling_streaming_pipelines_and_pages(tokenizer):
    model = load(layers=1)
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts, samples = [], []
    for compiled in (False, True):
        if compiled:
            model.compile(backend="mla")
        streamer = transformers.TextIteratorStreamer(tokenizer)
        generate(model, tokenizer, WAYS["greedy"], streamer=streamer)
        texts.append(
            (
                "".join(streamer),
                pipeline(PROMPT, max_new_tokens=TOKENS, do_sample=False)[0]["generated_text"],
                pipeline([PROMPT] * 2, max_new_tokens=1, do_sample=False)[1][0]["generated_text"],
            )
        )
        samples.append(generate(model, tokenizer, WAYS["sampling"]))
    assert texts[0] == texts[1]
    assert torch.equal(*samples)
    assert_all_rewritten(model, WAYS["greedy"].most)


@pytest.mark.usefixtures("without_codegen")
def test_transformers_compiles_decoding_itself(tokenizer):
    """transformers applies `CompileConfig` to decoding alone, and on CPUs only if this flag is set."""
    model, way = load(layers=2), WAYS["static"]
    config = transformers.CompileConfig(backend="mla", fullgraph=True)
    config._compile_all_devices = True
    expected = generate(model, tokenizer, way)
    assert torch.equal(generate(model, tokenizer, way, disable_compile=False, compile_config=config), expected)
    assert_all_rewritten(model, most=1)
    assert {site.path for site in mla_compile.last_report().sites} == {"absorbed"}


def test_generate_of_what_torch_compile_returns_says_that_it_is_not_compiled(tokenizer):
    model = load(layers=1)
    expected = generate(model, tokenizer, WAYS["greedy"], tokens=3)
    compiled = torch.compile(model, backend="mla")
    with pytest.warns(UserWarning, match=r'Write model\.compile\(backend="mla"\)'):
        assert torch.equal(generate(compiled, tokenizer, WAYS["greedy"], tokens=3), expected)
    assert not mla_compile.reports()


@pytest.mark.slow
def test_four_thousand_tokens_in_one_go(tokenizer):
    model, way = load(), WAYS["greedy"]
    expected = generate(model, tokenizer, way, tokens=4000)
    model.compile(backend="mla")
    assert torch.equal(generate(model, tokenizer, way, tokens=4000), expected)
    assert_all_rewritten(model, way.most)
