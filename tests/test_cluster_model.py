"""`mla-compile layout`: the weights of a model, by its config.json."""

import json
from pathlib import Path

import pytest
import torch

from mla_compile.cluster.model import read_model
from mla_compile.errors import ConfigError

TINY = Path(__file__).parents[1] / "examples" / "tiny-deepseek-v3"
V3 = json.loads((TINY.parent / "deepseek-v3.json").read_text())
FP8 = {"quantization_config": V3.pop("quantization_config")}
LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 4, "n_routed_experts": 16}
DEFAULTS = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
    "kimi_k25": {},
    "minicpm3": {},
    "mistral4": {},
    "youtu": {},
    "sarvam_mla": {},
    "axk1": {},
}
"""The families that have one kind of attention in every layer, and what their default configs lack."""
NOT_COUNTED = {"axk1": 60 * 7168}
"""A norm after the experts of each layer, of which the config says nothing."""


@pytest.mark.parametrize(
    "changes", [{}, {"q_lora_rank": None}, {"n_shared_experts": 2}, {"first_k_dense_replace": 61}], ids=str
)
def test_weights_are_those_of_the_model(config, changes):
    hf = pytest.importorskip("transformers")
    fields = V3 | LAYERS | changes
    with torch.device("meta"):
        model = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**fields))
    assert read_model(config(**fields)).elements == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", DEFAULTS)
def test_weights_are_those_of_each_family(name, tmp_path):
    """Of its text model, with the config that transformers saves."""
    hf = pytest.importorskip("transformers")
    if name not in hf.CONFIG_MAPPING:
        pytest.skip("this transformers does not know the family")
    saved = hf.AutoConfig.for_model(name, **DEFAULTS[name])
    saved.save_pretrained(tmp_path)
    text = saved.get_text_config()
    whole = hf.Mistral4ForCausalLM if name == "mistral4" else hf.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = whole(text)
    model.tie_weights()
    expected = sum(p.numel() for p in model.parameters()) - NOT_COUNTED.get(name, 0)
    assert read_model(tmp_path).elements == expected


def sparse_layers(path):
    return [i for i, layer in enumerate(read_model(path).layers) if layer.expert]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"first_k_dense_replace": 1}, [1, 2, 3]),
        ({"first_k_dense_replace": 0}, [0, 1, 2, 3]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 1}, [1, 2, 3]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2]),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 3}, [0, 3]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": None}, [1, 2, 3]),
        ({"first_k_dense_replace": None, "moe_layer_freq": [0, 1, 0, 1]}, [1, 3]),
        ({"first_k_dense_replace": 2, "moe_layer_freq": [0, 1, 0, 1]}, [3]),
        ({"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}, [0, 3]),
        ({"mlp_layer_types": ["dense"] * 3 + ["sparse"], "first_k_dense_replace": 1, "moe_layer_freq": 2}, [3]),
        ({"mlp_layer_types": None, "first_k_dense_replace": 3}, [3]),
        ({"n_routed_experts": None, "first_k_dense_replace": None}, []),
    ],
    ids=str,
)
def test_layers_with_experts(fields, expected, config):
    assert sparse_layers(config(**V3 | LAYERS | fields)) == expected


def test_layers_of_longcat_flash_are_refused(tmp_path):
    """The model has two attentions in each; its parameters are more than its checkpoint's 560 billion."""
    hf = pytest.importorskip("transformers")
    hf.LongcatFlashConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"found ffn_hidden_size, .*: two of each in a layer, .* are not counted$"):
        read_model(tmp_path)


@pytest.mark.parametrize("name", ["ffn_hidden_size", "expert_ffn_hidden_size", "zero_expert_num"])
def test_fields_of_longcat_flash_matter_where_they_say_something(name, config):
    with pytest.raises(ConfigError, match=f"expected one attention and one MLP or experts in a layer, found {name} in"):
        read_model(config(**V3 | {name: 256}))
    assert read_model(config(**V3 | {name: 0})) == read_model(config(**V3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mlp_layer_types": ["sparse"] * 3}, "expected mlp_layer_types in .* each of 4 layers, found 3 entries"),
        ({"mlp_layer_types": "sparse"}, "expected mlp_layer_types in .* each of 4 layers, found 'sparse'"),
        ({"mlp_layer_types": ["moe"] * 4}, "expected mlp_layer_types in .* to be a list of dense and sparse, found"),
        ({"moe_layer_freq": 0}, "expected moe_layer_freq in .* to be a positive whole number, found 0"),
        ({"moe_layer_freq": [0, 1]}, "expected moe_layer_freq in .* each of 4 layers, found 2 entries"),
        ({"moe_layer_freq": [0, 1, 2, 3]}, "expected moe_layer_freq in .* or a list of 0 and 1, found"),
        ({"first_k_dense_replace": None}, "expected mlp_layer_types or first_k_dense_replace in .*, found neither"),
    ],
)
def test_layers_with_experts_that_are_not_told(fields, message, config):
    with pytest.raises(ConfigError, match=message):
        read_model(config(**V3 | LAYERS | fields))


def test_a_number_of_layers_that_the_file_leaves_to_transformers(config):
    pytest.importorskip("transformers")
    whole = {key: value for key, value in V3.items() if key != "num_hidden_layers"}
    assert read_model(config(**whole)) == read_model(config(**V3))


def test_shared_experts_have_two_names(config):
    """The second is that of sarvam-105b's own config."""
    (shared,) = {layer.dense for layer in read_model(config(**V3 | {"first_k_dense_replace": 0})).layers}
    others = V3 | {"first_k_dense_replace": 0, "n_shared_experts": None, "num_shared_experts": 2}
    assert {layer.dense for layer in read_model(config(**others)).layers} == {2 * shared}


def test_weights_of_the_example():
    hf = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained(TINY))
    model.tie_weights()
    assert read_model(TINY).elements == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (V3 | {"hidden_size": None}, "expected hidden_size in .* to be a positive whole number, found None"),
        (V3 | {"first_k_dense_replace": "all"}, "expected first_k_dense_replace in .* whole number, found 'all'"),
        (V3 | {"num_experts_per_tok": 999}, "expected num_experts_per_tok in .* at most 256 experts, found 999"),
        (
            V3 | {"tie_word_embeddings": "false"},
            "expected tie_word_embeddings in .* to be true or false, found 'false'",
        ),
        (V3 | {"hidden_size": 10**400}, "expected hidden_size in .* to be at most 2,147,483,647, found 1000"),
        (V3 | {"index_head_dim": "64"}, "expected index_head_dim in .* to be a positive whole number, found '64'"),
        (V3 | {"quantization_config": "fp8"}, "expected quantization_config in .* to be an object, found 'fp8'"),
        (
            V3 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": "a"}},
            "expected weight_block_size in .* to be a pair of whole numbers, found 'a'",
        ),
        (V3 | {"index_head_dim": 128}, "expected attention of one kind in every layer"),
        (V3 | {"layer_types": ["linear_attention", *["full_attention"] * 60]}, "expected attention of one kind"),
    ],
)
def test_a_config_that_does_not_say_enough(fields, message, config):
    with pytest.raises(ConfigError, match=message):
        read_model(config(**fields))


@pytest.mark.parametrize(
    "method",
    ["compressed-tensors", "FP8", ["fp8"], "gptq", "awq", "bitsandbytes", "mxfp4", "modelopt", None],
    ids=str,
)
def test_weights_of_another_dtype_are_asked_for(method, config):
    quantized = config(**V3 | {"quantization_config": {"quant_method": method, "bits": 4}})
    with pytest.raises(
        ConfigError, match=r"expected quant_method in .* to be fp8, or --weights \(bf16 or fp8\) to be given"
    ):
        read_model(quantized)
    assert read_model(quantized, fp8=False) == read_model(config(**V3))
    assert read_model(quantized, fp8=True) == read_model(config(**V3 | FP8))


@pytest.mark.parametrize("none", [None, {}])
def test_weights_are_in_bfloat16_if_nothing_else_is_said(none, config):
    assert read_model(config(**V3 | {"quantization_config": none})).fp8 is False


def test_the_quantization_of_a_model_with_vision(config):
    """Its config says it of the whole model, or of the text model."""
    assert read_model(config(text_config=V3, **FP8)).fp8 is True
    assert read_model(config(text_config=V3 | FP8)).fp8 is True
    with pytest.raises(ConfigError, match=r"expected quant_method in .*, found 'awq'"):
        read_model(config(text_config=V3, quantization_config={"quant_method": "awq"}))


def test_what_the_argument_says_of_weights_counts(config):
    assert read_model(config(**V3 | FP8), fp8=False).fp8 is False
    assert read_model(config(**V3), fp8=True).block == 128
