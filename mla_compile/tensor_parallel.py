"""`tp_plan`: the rules by which transformers shares the heads of MLA out over processes.

transformers' own plans (`base_model_tp_plan` of a config) share out the attention of some families with MLA, and of
others only what stands beside it: each rank then has all heads, and all of their weights.
"""

from __future__ import annotations

from typing import Any

from .errors import ConfigError

_WITHOUT_RULES: dict[str, dict[str, str]] = {
    "axk1": {},
    "deepseek_v3": {},
    "mistral4": {},
    # A bare parameter has no forward: its owner runs with this rank's part of it.
    "mistral_large4_text": {
        "softmax_scaling.scale": "colwise",
        "softmax_scaling.bias": "colwise",
        "softmax_scaling": "local_params",
    },
    "youtu": {},
}
"""Families whose attention transformers has no rules for, and what of it has heads besides the projections of all."""


def tp_plan(config: Any) -> dict[str, str]:
    """The `tp_plan` of `transformers.distributed.DistributedConfig` that shares out the heads of a model with MLA.

    It is transformers' own plan, and the rules of the attention where that lacks them: the projections to heads are cut
    by their outputs, that from heads by its inputs, and what has no heads (latents, an indexer) is whole on each rank.
    Names are those of the model with a head on it (`...ForCausalLM`, `...ForConditionalGeneration`).

    Args: config, of a model whose number of heads the number of ranks divides.
    Raises: ConfigError, if the config is of no MLA, of a family that is not known, or has layers of linear attention.
    """
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None) is None:
        raise ConfigError(f"expected a model with MLA (a config with kv_lora_rank), found {config.model_type}")
    if "linear_attention" in (getattr(text, "layer_types", None) or ()):
        raise ConfigError(
            f"expected MLA in every layer, found linear attention too ({config.model_type}): the rules of transformers"
            " hold for all layers alike, and projections of the same names have other heads there"
        )
    rules: dict[str, str] = dict(text.base_model_tp_plan or {})
    if not any(name.endswith(".kv_b_proj") for name in rules):
        rules |= {f"layers.*.self_attn.{name}": style for name, style in _attention(text).items()}
    prefix = "model." if text is config else "model.language_model."
    return {prefix + name: style for name, style in rules.items()}


def _attention(text: Any) -> dict[str, str]:
    if text.model_type not in _WITHOUT_RULES:
        known = ", ".join(sorted(_WITHOUT_RULES))
        raise ConfigError(f"expected a family with rules in transformers or one of {known}, found {text.model_type}")
    query = "q_proj" if getattr(text, "q_lora_rank", None) is None else "q_b_proj"
    # Of the latent's projection only gradients are shared: of the rope key, each rank has those of its heads.
    projections = {query: "colwise", "kv_a_proj_with_mqa": "mla_kv_a_proj", "kv_b_proj": "colwise", "o_proj": "rowwise"}
    return projections | _WITHOUT_RULES[text.model_type]
