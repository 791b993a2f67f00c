"""Read the sizes of a model's caches from its config.json.

The file is read directly. transformers, if installed, completes it if it leaves sizes or kinds of layers to defaults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .fields import Fields, is_count, read_config

WIDTHS = {
    "num_attention_heads": "N",
    "kv_lora_rank": "L",
    "qk_nope_head_dim": "P",
    "qk_rope_head_dim": "R",
    "v_head_dim": "V",
}
NEEDED = ("num_hidden_layers", *WIDTHS)
LEFT_TO_DEFAULTS = ("linear_", "layer_group_size", "swa_", "kv_source_layers")
"""Prefixes of keys which, without `layer_types`, show that there are several kinds of layers but not which is which."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine what one layer caches per token. All are positive, except `R`, which may be 0."""

    N: int
    L: int
    P: int
    R: int
    V: int
    window: int | None = None
    """The number of tokens that the layer keeps; None if it keeps all."""

    def __str__(self) -> str:
        named = " ".join(f"{name}={getattr(self, name)}" for name in WIDTHS.values())
        return named + (f" window={self.window}" if self.window is not None else "")


@dataclass(frozen=True)
class ModelSizes:
    """The layers of a model that keep latents."""

    name: str
    layers: Mapping[Sizes, int]
    """The number of layers of each kind, the most frequent first."""
    others: int = 0
    """The number of layers without a growing cache: linear attention, or layers that use an earlier layer's keys."""
    index_width: int = 0
    """The width of an indexer's key per token; 0 without an indexer."""
    indexers: int = 0
    """The number of layers that keep such keys."""

    @property
    def count(self) -> int:
        """The number of layers that keep latents."""
        return sum(self.layers.values())


def read_sizes(path: Path) -> ModelSizes:
    """Read the sizes of a model from a config.json, or from the directory that contains it.

    Raises:
        ConfigError: if the file is no JSON or not of an MLA model, or neither it nor transformers gives a size.
        OSError: if there is no such file.
    """
    config, text = read_config(path)
    name = config.name("model_type") or "model"
    if not text.values.get("kv_lora_rank"):
        raise ConfigError(
            f"expected the config of an MLA model, with kv_lora_rank, found {name} without one in {text.file}"
        )
    text = _with_kinds(text)
    mixed = not text.values.get("layer_types") and any(key.startswith(LEFT_TO_DEFAULTS) for key in text.values)
    missing = [key for key in NEEDED if text.values.get(key) is None] + ["layer_types"] * mixed
    return _sizes(name, _completed(config, missing) if missing else text)


def _with_kinds(text: Fields) -> Fields:
    """The fields, with `layer_types` if layers with linear attention are only told apart as in Kimi's checkpoints:
    `full_attn_layers` in `linear_attn_config` numbers the others from 1."""
    linear = text.part("linear_attn_config")
    full = linear.values.get("full_attn_layers")
    if full is None or text.values.get("layer_types") or text.values.get("num_hidden_layers") is None:
        return text
    total = text.layers()
    layers = range(1, total + 1)
    if not (isinstance(full, list) and all(is_count(i) and i in layers for i in full)):
        raise linear.wrong("full_attn_layers", f"a list of layers, 1 to {total}")
    return text.with_values({"layer_types": [f"{'full' if i in full else 'linear'}_attention" for i in layers]})


def _completed(config: Fields, missing: list[str]) -> Fields:
    """The fields of this file as completed by transformers' config class."""
    named = config.values.get("model_type", "")
    lacking = f"expected {', '.join(missing)} in {config.file}, found none"
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(
            f"{lacking}; with transformers its defaults are known: pip install 'mla-compile[hf]'"
        ) from error
    fields = {key: value for key, value in config.values.items() if key != "model_type"}
    try:
        known = AutoConfig.for_model(named, **fields).get_text_config()
    except ValueError as error:
        told, _, _ = str(error).partition(". Should contain one of")  # the names of all models
        raise ConfigError(f"{lacking}; transformers does not know this model: {told}") from error
    except Exception as error:  # of transformers or huggingface_hub: they have no base class in common
        raise ConfigError(f"{lacking}; transformers refuses the config: {' '.join(str(error).split())}") from error
    if isinstance(known, dict):  # fields of a text model, in the config of a model that has no other part
        raise ConfigError(f"{lacking}; {named} has no text_config")
    found: dict[str, Any] = known.to_dict()
    found |= {key: getattr(known, key, None) for key in NEEDED if found.get(key) is None}  # some are properties
    if "num_hidden_layers" in missing and known.model_type == "longcat_flash":
        found["num_hidden_layers"] = 2 * known.num_layers  # in transformers 5.17 only the model says so, not its config
    if unknown := [key for key in NEEDED if found[key] is None]:
        raise ConfigError(
            f"expected {', '.join(unknown)} in {config.file}, found none there and none in transformers' defaults"
        )
    return Fields(found, config.file)


def _sizes(name: str, read: Fields) -> ModelSizes:
    total = read.layers()
    kinds = read.of_each_layer("layer_types") or ["full_attention"] * total
    owners = read.of_each_layer("kv_source_layers") or range(total)
    indexers = read.of_each_layer("indexer_types") or ["full"] * total
    found: Counter[Sizes] = Counter()
    for i, (kind, own) in enumerate(zip(kinds, read.per_layer(), strict=True)):
        if not str(kind).startswith("linear") and owners[i] == i:
            found[_of_layer(own, str(kind))] += 1
    if not found:
        raise ConfigError(f"expected layers that keep latents in {read.file}, found none")
    index_width = read.given("index_head_dim")
    with_indexer = sum(_may_index(kind) and own == "full" for kind, own in zip(kinds, indexers, strict=True))
    return ModelSizes(
        name,
        dict(found.most_common()),
        len(kinds) - found.total(),
        index_width,
        with_indexer if index_width else 0,
    )


def _may_index(kind: object) -> bool:
    return not str(kind).startswith(("linear", "sliding"))


def _of_layer(read: Fields, kind: str) -> Sizes:
    widths = {short: read(key, least=0 if short == "R" else 1) for key, short in WIDTHS.items()}
    windowed = kind.startswith("sliding") and read.values.get("sliding_window") is not None
    return Sizes(**widths, window=read("sliding_window") if windowed else None)
