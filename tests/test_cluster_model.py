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


@pytest.mark.parametrize(
    "changes", [{}, {"q_lora_rank": None}, {"n_shared_experts": 2}, {"first_k_dense_replace": 61}], ids=str
)
def test_weights_are_those_of_the_model(config, changes):
    hf = pytest.importorskip("transformers")
    fields = V3 | {"num_hidden_layers": 4, "num_attention_heads": 4, "n_routed_experts": 16} | changes
    with torch.device("meta"):
        model = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**fields))
    assert read_model(config(**fields)).elements == sum(p.numel() for p in model.parameters())


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


def test_what_the_argument_says_of_weights_counts(config):
    assert read_model(config(**V3 | FP8), fp8=False).fp8 is False
    assert read_model(config(**V3), fp8=True).block == 128
