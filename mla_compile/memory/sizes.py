"""Read the sizes of a model's caches from its config.json.

The file is read directly. transformers, if installed, completes it if it leaves sizes or kinds of layers to defaults.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

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
    file, config, text = read_config(path)
    name = str(config.get("model_type") or "model")
    if not text.get("kv_lora_rank"):
        raise ConfigError(f"expected the config of an MLA model, with kv_lora_rank, found {name} without one in {file}")
    text = _with_kinds(text, file)
    mixed = not text.get("layer_types") and any(key.startswith(LEFT_TO_DEFAULTS) for key in text)
    missing = [key for key in NEEDED if text.get(key) is None] + ["layer_types"] * mixed
    return _sizes(name, _completed(config, missing, file) if missing else text, file)


def is_count(value: object, least: int = 1) -> bool:
    """Whether a field of a config is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def read_config(path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Read a config: the path of the file (`path`, or the config.json in it), its content, and the text model's part.

    Raises:
        ConfigError: if the folder has no config.json, or the file is no JSON object.
        OSError: if the file cannot be read.
    """
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise ConfigError(f"expected a config.json in {path}, found none")
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"expected JSON in {file}, found: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"expected a JSON object in {file}, found {type(config).__name__}")
    return file, config, config["text_config"] if isinstance(config.get("text_config"), dict) else config


def _with_kinds(text: dict[str, Any], file: Path) -> dict[str, Any]:
    """The fields, with `layer_types` if layers with linear attention are only told apart as in Kimi's checkpoints:
    `full_attn_layers` in `linear_attn_config` numbers the others from 1."""
    linear = text.get("linear_attn_config")
    full = linear.get("full_attn_layers") if isinstance(linear, dict) else None
    if full is None or text.get("layer_types") or not is_count(text.get("num_hidden_layers")):
        return text
    total = text["num_hidden_layers"]
    layers = range(1, total + 1)
    if not (isinstance(full, list) and all(is_count(i) and i in layers for i in full)):
        raise ConfigError(f"expected full_attn_layers in {file} to be a list of layers, 1 to {total}, found {full!r}")
    return text | {"layer_types": [f"{'full' if i in full else 'linear'}_attention" for i in layers]}


def _completed(config: dict[str, Any], missing: list[str], file: Path) -> dict[str, Any]:
    """The fields of this file as completed by transformers' config class."""
    lacking = f"expected {', '.join(missing)} in {file}, found none"
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(
            f"{lacking}; with transformers its defaults are known: pip install 'mla-compile[hf]'"
        ) from error
    fields = {key: value for key, value in config.items() if key != "model_type"}
    try:
        known = AutoConfig.for_model(config.get("model_type", ""), **fields).get_text_config()
    except ValueError as error:
        told, _, _ = str(error).partition(". Should contain one of")  # the names of all models
        raise ConfigError(f"{lacking}; transformers does not know this model: {told}") from error
    except StrictDataclassError as error:
        raise ConfigError(f"{lacking}; transformers refuses the config: {' '.join(str(error).split())}") from error
    if isinstance(known, dict):  # fields of a text model, in the config of a model that has no other part
        raise ConfigError(f"{lacking}; {config.get('model_type')} has no text_config")
    found: dict[str, Any] = known.to_dict()
    found |= {key: getattr(known, key, None) for key in NEEDED if found.get(key) is None}  # some are properties
    if "num_hidden_layers" in missing and known.model_type == "longcat_flash":
        found["num_hidden_layers"] = 2 * known.num_layers  # in transformers 5.17 only the model says so, not its config
    if unknown := [key for key in NEEDED if found[key] is None]:
        raise ConfigError(
            f"expected {', '.join(unknown)} in {file}, found none there and none in transformers' defaults"
        )
    return found


def _sizes(name: str, config: Mapping[str, Any], file: Path) -> ModelSizes:
    total = config["num_hidden_layers"]
    if not is_count(total):
        raise ConfigError(f"expected num_hidden_layers in {file} to be a positive whole number, found {total!r}")
    kinds = _of_each_layer(config, "layer_types", file) or ["full_attention"] * total
    owners = _of_each_layer(config, "kv_source_layers", file) or range(total)
    indexers = _of_each_layer(config, "indexer_types", file) or ["full"] * total
    own = {int(i): overrides for i, overrides in (config.get("per_layer_config") or {}).items()}
    found: Counter[Sizes] = Counter()
    for i, kind in enumerate(kinds):
        if not str(kind).startswith("linear") and owners[i] == i:
            found[_of_layer({**config, **own.get(i, {})}, str(kind), file)] += 1
    if not found:
        raise ConfigError(f"expected layers that keep latents in {file}, found none")
    index_width = config.get("index_head_dim") or 0
    with_indexer = sum(_may_index(kind) and own == "full" for kind, own in zip(kinds, indexers, strict=True))
    return ModelSizes(
        name,
        dict(found.most_common()),
        len(kinds) - found.total(),
        index_width,
        with_indexer if index_width else 0,
    )


def _of_each_layer(config: Mapping[str, Any], key: str, file: Path) -> Sequence[Any] | None:
    """A list of the config with an entry for each layer, if the config has it."""
    found, layers = config.get(key), config["num_hidden_layers"]
    if not found or (isinstance(found, list | tuple) and len(found) == layers):
        return found or None
    told = f"{len(found)} entries" if isinstance(found, list | tuple) else repr(found)
    raise ConfigError(f"expected {key} in {file} to have an entry for each of {layers} layers, found {told}")


def _may_index(kind: object) -> bool:
    return not str(kind).startswith(("linear", "sliding"))


def _of_layer(config: Mapping[str, Any], kind: str, file: Path) -> Sizes:
    widths = {short: config[key] for key, short in WIDTHS.items()}
    window = config.get("sliding_window") if kind.startswith("sliding") else None
    for key, short in WIDTHS.items():
        if not is_count(widths[short], least=0 if short == "R" else 1):
            raise ConfigError(f"expected {key} in {file} to be a positive whole number, found {widths[short]!r}")
    return Sizes(**widths, window=window)
