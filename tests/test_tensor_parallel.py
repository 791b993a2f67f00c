"""The rules of `tp_plan`: those of transformers for each family, and of attention where it has none."""

import re

import pytest

import mla_compile

pytest.importorskip("transformers")

import transformers

from tests.hf import families
from tests.hf.families import FAMILIES, SHARED_OUT, WITH_LINEAR_ATTENTION

MISSING = {
    "deepseek_v3": {"q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    "mistral4": {"q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    "kimi_k25": {"q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    "youtu": {"q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    "axk1": {"q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    "sarvam_mla": {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    "mistral_large4": {
        *("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        *("softmax_scaling", "softmax_scaling.scale", "softmax_scaling.bias"),
    },
}


@pytest.mark.parametrize("family", SHARED_OUT)
def test_what_transformers_lacks_is_added_under_the_names_of_the_model(family):
    model = FAMILIES[family].build()
    plan = mla_compile.tp_plan(model.config)
    added = plan.keys() - model.tp_plan.keys()
    assert {name.partition(".self_attn.")[2] for name in added} == MISSING.get(family, set())
    named = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    assert added <= {re.sub(r"\.\d+(?=\.)", ".*", name) for name in named}
    assert {name: style for name, style in plan.items() if name in model.tp_plan}.items() <= model.tp_plan.items()


def test_without_a_query_lora_the_query_has_one_projection():
    plan = mla_compile.tp_plan(transformers.DeepseekV3Config(**families.PLAIN | {"q_lora_rank": None}))
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert "model.layers.*.self_attn.q_b_proj" not in plan


class Unheard(transformers.DeepseekV3Config):
    model_type = "unheard"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.LlamaConfig(), r"expected a model with MLA \(a config with kv_lora_rank\), found llama"),
        ("deepseek_v4", r"expected a model with MLA \(a config with kv_lora_rank\), found deepseek_v4"),
        (
            Unheard(),
            "expected a model family that has rules in transformers, or one of axk1, deepseek_v3, .*, found unheard",
        ),
        *((name, "expected MLA in every layer, found linear attention too") for name in WITH_LINEAR_ATTENTION),
    ],
    ids=["no MLA", "keys that are values", "unknown", *WITH_LINEAR_ATTENTION],
)
def test_what_cannot_be_shared_out_is_refused(config, message):
    config = FAMILIES[config].build().config if isinstance(config, str) else config
    with pytest.raises(mla_compile.ConfigError, match=message):
        mla_compile.tp_plan(config)
