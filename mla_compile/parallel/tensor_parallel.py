"""`tp_plan`: the rules by which transformers splits the heads of MLA over ranks.

transformers' own plans (`base_model_tp_plan` of a config) split the attention of some families with MLA. For the others
they split only the rest of the model, so that each rank holds all heads and all of their weights.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError

_WITHOUT_RULES: dict[str, dict[str, str]] = {
    "axk1": {},
    "deepseek_v3": {},
    "mistral4": {},
    # Bare parameters have no forward, so the module that owns them runs with this rank's part.
    "mistral_large4_text": {
        "softmax_scaling.scale": "colwise",
        "softmax_scaling.bias": "colwise",
        "softmax_scaling": "local_params",
    },
    "sarvam_mla": {},
    "youtu": {},
}
"""The model families for whose attention transformers has no rules, with rules for parts beside the projections."""


def tp_plan(config: Any) -> dict[str, str]:
    """The `tp_plan` for `transformers.distributed.DistributedConfig` that splits the heads of a model with MLA.

    It is transformers' own plan plus the attention rules where these are missing: projections to heads are split by
    outputs, the projection from heads by inputs, and parts without heads (latents, an indexer) are whole on each rank.
    Names are those of the model with its task head (`...ForCausalLM`, `...ForConditionalGeneration`).

    Args: config, of a model whose number of heads is divisible by the number of ranks.
    Raises: ConfigError if the config has no MLA, is of an unknown family, or has layers of linear attention.
    """
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None) is None:
        raise ConfigError(f"expected a model with MLA (a config with kv_lora_rank), found {config.model_type}")
    if "linear_attention" in (getattr(text, "layer_types", None) or ()):
        raise ConfigError(
            f"expected MLA in every layer, found linear attention too ({config.model_type}): transformers' "
            "rules apply to all layers alike, but projections of the same names have other heads in those layers"
        )
    rules: dict[str, str] = dict(text.base_model_tp_plan or {})
    if not any(name.endswith(".kv_b_proj") for name in rules):
        rules |= {f"layers.*.self_attn.{name}": style for name, style in _attention(text).items()}
    prefix = "model." if text is config else "model.language_model."
    return {prefix + name: style for name, style in rules.items()}


def _attention(text: Any) -> dict[str, str]:
    if text.model_type not in _WITHOUT_RULES:
        known = ", ".join(sorted(_WITHOUT_RULES))
        raise ConfigError(
            f"expected a model family that has rules in transformers, or one of {known}, found {text.model_type}"
        )
    query = "q_proj" if getattr(text, "q_lora_rank", None) is None else "q_b_proj"
    # The latent's projection is whole on each rank; only its gradients are summed: each rank has the rope key's
    # gradient from its own heads.
    projections = {query: "colwise", "kv_a_proj_with_mqa": "mla_kv_a_proj", "kv_b_proj": "colwise", "o_proj": "rowwise"}
    return projections | _WITHOUT_RULES[text.model_type]
