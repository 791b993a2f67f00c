"""Every family of transformers with Multi-head Latent Attention: a tiny random model of each, and what becomes of it.

`python -m tests.hf.families` prints the table of `docs/families.md`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import configuration_utils

from mla_compile import device as device_rates
from mla_compile.backend import mla
from mla_compile.cost import Device
from mla_compile.report import Report, last_report, merged
from tests.without_codegen import without_codegen

DEVICE = Device("table", flops_per_s=2e11, bytes_per_s=7e10)
"""The rates of the CPU on which the table is made: the paths are the same on every machine."""

VOCABULARY = 64
MOST_TOKENS = 32

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough that attention weights are far from uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
QUERY_LORA = {"q_lora_rank": 24}
ROPE = {"qk_rope_head_dim": 8}
TWO_LAYERS = {"num_hidden_layers": 2, "intermediate_size": 48}
PLAIN = SIZES | QUERY_LORA | ROPE | TWO_LAYERS
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = PLAIN | EXPERTS | {"mlp_layer_types": ["dense", "sparse"]}
INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 4}
SHARED_INDEXER = INDEXER | {"indexer_types": ["full", "shared"]}
LINEAR = {"mlp_layer_types": ["dense", "sparse"], "linear_head_dim": 8, "linear_num_heads": 4}
VISION = {"hidden_size": 16, "intermediate_size": 16}


def _without(sizes: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in sizes.items() if name not in names}


def _longcat_flash() -> nn.Module:
    sizes = _without(PLAIN, "num_hidden_layers", "intermediate_size")
    experts = {"expert_ffn_hidden_size": 16, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2}
    config = hf.LongcatFlashConfig(**sizes, **experts, num_layers=1, ffn_hidden_size=48, head_dim=8)
    return hf.LongcatFlashForCausalLM(config)


def _glm5_next() -> nn.Module:
    linear = LINEAR | {"layer_types": ["linear_attention", "indexed_attention"], "index_kpool": 2}
    text = ROUTED | INDEXER | linear | {"qk_rope_head_dim": 0, "hc_sinkhorn_iters": 3}
    vision = VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
    return hf.Glm5NextForConditionalGeneration(hf.Glm5NextConfig(text_config=text, vision_config=vision))


def _mistral_large4() -> nn.Module:
    text = _without(ROUTED, "q_lora_rank") | SHARED_INDEXER | {"no_rope_layers": [1, 0]}
    vision = VISION | {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2}
    return hf.MistralLarge4ForConditionalGeneration(hf.MistralLarge4Config(text_config=text, vision_config=vision))


def _dots3_note() -> nn.Module:
    sliding = {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 20,
        "swa_qk_nope_head_dim": 12,
        "swa_v_head_dim": 10,
    }
    layers = {"layer_types": ["indexed_attention", "sliding_attention"], "sliding_window": 8, "head_dim": 20}
    return hf.Dots3NoteForCausalLM(hf.Dots3NoteTextConfig(**ROUTED, **INDEXER, **layers, **sliding))


def _deepseek_v4() -> nn.Module:
    layers = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    sizes = _without(SIZES, "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "num_key_value_heads")
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = hf.DeepseekV4Config(
        **sizes | QUERY_LORA | ROPE | experts | INDEXER | {"index_topk": 2},
        num_hidden_layers=3,
        head_dim=16,
        layer_types=layers,
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        mlp_layer_types=["hash_moe", "moe", "moe"],
        sliding_window=4,
        hc_mult=2,
        hc_sinkhorn_iters=3,
        o_groups=2,
        o_lora_rank=8,
    )
    return hf.DeepseekV4ForCausalLM(config)


def _kimi_k25() -> nn.Module:
    vision = VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
    vision |= {"pos_emb_height": 4, "pos_emb_width": 4, "rope_parameters": {"rope_theta": 1e4, "rope_type": "axial"}}
    text = PLAIN | EXPERTS | {"first_k_dense_replace": 1, "model_type": "deepseek_v3"}
    config = hf.Kimi_K25Config(text_config=text, vision_config=vision, projection_hidden_size=16, image_token_id=1)
    return hf.Kimi_K25ForConditionalGeneration(config)


def _kimi_linear() -> nn.Module:
    experts = {"num_local_experts": 4} | _without(EXPERTS, "n_routed_experts")
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    return hf.KimiLinearForCausalLM(hf.KimiLinearConfig(**PLAIN, **experts, **LINEAR, **layers))


def _bailing_hybrid() -> nn.Module:
    experts = {"num_local_experts": 4} | _without(EXPERTS, "n_routed_experts")
    layers = {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]}
    return hf.BailingHybridForCausalLM(hf.BailingHybridConfig(**PLAIN, **experts, **layers, head_dim=8))


def _hy_v4_vl() -> nn.Module:
    rope = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 1, 1]}
    text = ROUTED | SHARED_INDEXER | {"hc_mult": 2, "learnable_sink_init": 0.5, "rope_parameters": rope}
    vision = VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "out_hidden_size": 32, "max_image_size": 32}
    return hf.HYV4VLForConditionalGeneration(hf.HYV4VLConfig(text_config=text, vision_config=vision))


def _sarvam_mla() -> nn.Module:
    config = hf.SarvamMLAConfig(**_without(PLAIN, "q_lora_rank"), **EXPERTS, first_k_dense_replace=1)
    return hf.AutoModelForCausalLM.from_config(config)


INDEXED = "indexed_attention" in configuration_utils.ALLOWED_LAYER_TYPES
EXPANDED = "this transformers stores expanded keys for models with an indexer"
_OF_INDEXED = ("deepseek_v32", "glm_moe_dsa", "glm5_next", "hy_v4", "hy_v4_vl", "axk2", "dots3_note", "mistral_large4")
_NEWER = {
    "bailing_hybrid": "BailingHybridConfig",
    "hy_v4_vl": "HYV4VLConfig",
    "sarvam_mla": "SarvamMLAConfig",
}
"""Families that transformers 5.17 lacks, each by its config class; the last two came with 5.24."""


@dataclass(frozen=True)
class Family:
    """A model type of transformers; `sites` counts its model's MLA attentions.

    `counts` says that the model asks for sizes that depend on data between up-projection and attention, so that the two
    are in one graph only with `torch._dynamo.config.capture_dynamic_output_shape_ops`.
    """

    name: str
    build: Callable[[], nn.Module]
    sites: int = 2
    attentions: tuple[str, ...] = ("sdpa", "eager")
    caches: tuple[str, ...] = ("dynamic", "static")
    counts: bool = False


FLEX = ("sdpa", "eager", "flex_attention")


def _there(family: Family) -> Family:
    """The family. A test that builds it is skipped if transformers is too old."""
    why = EXPANDED if family.name in _OF_INDEXED and not INDEXED else ""
    if not hasattr(hf, _NEWER.get(family.name, "PreTrainedModel")):
        why = "this transformers does not know the family"
    return replace(family, build=lambda: pytest.skip(why)) if why else family


FAMILIES = {
    family.name: _there(family)
    for family in (
        Family(
            "deepseek_v2",
            lambda: hf.DeepseekV2ForCausalLM(hf.DeepseekV2Config(**PLAIN, **EXPERTS, first_k_dense_replace=1)),
            attentions=FLEX,
        ),
        Family(
            "deepseek_v3",
            lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**PLAIN, **EXPERTS, first_k_dense_replace=1)),
            attentions=FLEX,
        ),
        Family("deepseek_v32", lambda: hf.DeepseekV32ForCausalLM(hf.DeepseekV32Config(**ROUTED, **INDEXER))),
        Family("deepseek_v4", _deepseek_v4, sites=3, attentions=("eager",), caches=("dynamic",)),
        Family("glm4_moe_lite", lambda: hf.Glm4MoeLiteForCausalLM(hf.Glm4MoeLiteConfig(**ROUTED)), attentions=FLEX),
        Family("glm_moe_dsa", lambda: hf.GlmMoeDsaForCausalLM(hf.GlmMoeDsaConfig(**ROUTED, **SHARED_INDEXER))),
        Family("glm5_next", _glm5_next, sites=1, counts=True),
        Family("kimi_k25", _kimi_k25, attentions=FLEX),
        Family("kimi_linear", _kimi_linear, sites=1),
        Family("longcat_flash", _longcat_flash, attentions=FLEX),
        Family("minicpm3", lambda: hf.MiniCPM3ForCausalLM(hf.MiniCPM3Config(**PLAIN)), attentions=FLEX),
        Family("mistral4", lambda: hf.Mistral4ForCausalLM(hf.Mistral4Config(**PLAIN, **EXPERTS)), attentions=FLEX),
        Family("youtu", lambda: hf.YoutuForCausalLM(hf.YoutuConfig(**PLAIN)), attentions=FLEX),
        Family(
            "hy_v4",
            lambda: hf.HYV4ForCausalLM(hf.HYV4Config(**ROUTED, **SHARED_INDEXER, hc_mult=2, learnable_sink_init=0.5)),
            attentions=("eager",),
        ),
        Family("hy_v4_vl", _hy_v4_vl, attentions=("eager",)),
        Family("sarvam_mla", _sarvam_mla, attentions=FLEX),
        Family("axk1", lambda: hf.AXK1ForCausalLM(hf.AXK1Config(**ROUTED)), attentions=FLEX),
        Family("axk2", lambda: hf.AXK2ForCausalLM(hf.AXK2Config(**ROUTED, **INDEXER))),
        Family("bailing_hybrid", _bailing_hybrid, sites=1),
        Family("dots3_note", _dots3_note),
        Family("mistral_large4", _mistral_large4),
    )
}

PHASES = {"prefill": 6, "decode": 1, "decode again": 1, "four tokens": 4}
"""The calls of a run, by how many tokens each brings."""
TOKENS = sum(PHASES.values())


WITH_LINEAR_ATTENTION = ("glm5_next", "kimi_linear", "bailing_hybrid")
SHARED_OUT = tuple(name for name in FAMILIES if name not in (*WITH_LINEAR_ATTENTION, "deepseek_v4"))
"""Families for which there is a `tp_plan`. DeepSeek-V4 has no `kv_lora_rank`: its keys are its values."""


def build(family: Family, attention: str) -> nn.Module:
    """A random model of a family, the same for every attention implementation."""
    torch.manual_seed(0)
    model = family.build().eval()
    model.set_attn_implementation(attention)
    return model


def exact(model: nn.Module) -> nn.Module:
    """The same model in float64. torch has no grouped matrix product of that dtype: its experts run batched."""
    double = copy.deepcopy(model).double()
    double.set_experts_implementation("batched_mm")
    return double


def some_ids() -> Tensor:
    """[2, TOKENS]"""
    return torch.randint(2, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def new_cache(model: nn.Module, kind: str) -> hf.Cache:
    config = model.config.get_text_config()
    if kind == "dynamic":
        return hf.DynamicCache(config=config)
    return hf.StaticCache(config=config, max_cache_len=MOST_TOKENS)


def logits(model: nn.Module, cache: str, ids: Tensor) -> list[Tensor]:
    """The logits of each phase, one call each, with a cache that the calls share."""
    past, start, outputs = new_cache(model, cache), 0, []
    for length in PHASES.values():
        outputs.append(model(ids[:, start : start + length], past_key_values=past, use_cache=True).logits)
        start += length
    return outputs


def decoded(model: nn.Module, cache: str, ids: Tensor) -> Tensor:
    """The logits of one token after a prefill that is not compiled."""
    past, length = new_cache(model, cache), PHASES["prefill"]
    model.forward(ids[:, :length], past_key_values=past, use_cache=True)
    return model(ids[:, length : length + 1], past_key_values=past, use_cache=True).logits


class Watch:
    """A backend that remembers which compilations ran."""

    def __init__(self) -> None:
        self.ran: list[Report] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled = mla(graph, inputs)
        report = last_report()
        assert report is not None

        def run(*arguments: Any) -> Any:
            self.ran.append(report)
            return compiled(*arguments)

        return run


def watched(model: nn.Module, cache: str, ids: Tensor) -> tuple[list[Tensor], list[Report]]:
    """Compile a model in place; its logits of each phase, and the report of the code that each phase ran."""
    watch = Watch()
    reports: list[Report] = []

    def after(*_: object) -> None:
        reports.append(merged(watch.ran))
        watch.ran.clear()

    model.compile(backend=watch)
    hook = model.register_forward_hook(after)
    try:
        return logits(model, cache, ids), reports
    finally:
        hook.remove()


def path_of(report: Report) -> str:
    """The path of all attentions of a report, or each one's."""
    return " and ".join(dict.fromkeys(site.path for site in report.sites)) or "none"


HEADER = "| family | attentions | " + " | ".join(PHASES) + " |"


def row(family: Family, attentions: tuple[str, ...], paths: tuple[str, ...]) -> str:
    """A line of the table: what the attentions of a family become in each phase."""
    named = ", ".join(f"`{name}`" for name in attentions)
    return f"| `{family.name}` | {family.sites} ({named}) | " + " | ".join(paths) + " |"


def rewritten_attentions(family: Family) -> tuple[str, ...]:
    """The attention implementations in the table: all but `flex_attention`."""
    return tuple(name for name in family.attentions if name != "flex_attention")


def table() -> list[str]:
    """The table of the page, of caches that grow. Takes minutes: it compiles every family with every attention."""
    lines = [HEADER, "|" + "---|" * HEADER.count(" | ") + "---|"]
    for family in FAMILIES.values():
        found: dict[tuple[str, ...], tuple[str, ...]] = {}
        for attention in rewritten_attentions(family):
            torch._dynamo.reset()
            with interpreted(family):
                _, reports = watched(build(family, attention), "dynamic", some_ids())
            paths = tuple(path_of(report) for report in reports)
            found[paths] = (*found.get(paths, ()), attention)
        lines += [row(family, attentions, paths) for paths, attentions in found.items()]
    return lines


@contextlib.contextmanager
def interpreted(family: Family) -> Iterator[None]:
    """Generate no code, and decide for one device, on any machine."""
    with (
        without_codegen(),
        mock.patch.object(device_rates, "measured", return_value=DEVICE),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=family.counts),
    ):
        yield


if __name__ == "__main__":
    with torch.no_grad():
        print("\n".join(table()))
