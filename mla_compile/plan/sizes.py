"""The sizes of a model's caches, read from its config.json.

The file is read as it is; transformers, if installed, completes one that leaves sizes or the kinds of layers to
defaults.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
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
"""Keys that, without `layer_types`, tell of layers of several kinds without saying which is which."""


@dataclass(frozen=True)
class Sizes:
    """What one layer caches of a token: sizes in design words, all positive but `R`, which may be 0."""

    N: int
    L: int
    P: int
    R: int
    V: int
    window: int | None = None
    """Tokens after which the layer forgets, None if it keeps all."""

    def __str__(self) -> str:
        named = " ".join(f"{name}={getattr(self, name)}" for name in WIDTHS.values())
        return named + (f" window={self.window}" if self.window is not None else "")


@dataclass(frozen=True)
class ModelSizes:
    """The layers of a model that keep latents."""

    name: str
    layers: Mapping[Sizes, int]
    """How many layers of each sizes, the most frequent first."""
    others: int = 0
    """Layers without a cache that grows: linear attention, or the keys of an earlier layer."""
    index_width: int = 0
    """Width of an indexer's key of one token, 0 without one."""
    indexers: int = 0
    """Layers that keep such keys."""

    @property
    def count(self) -> int:
        """Layers that keep latents."""
        return sum(self.layers.values())


def read_sizes(path: Path) -> ModelSizes:
    """The sizes of the model in a directory with a config.json, or of that file.

    Raises:
        ConfigError: no JSON, no MLA model, or a size that neither the file nor transformers says.
        OSError: no such file.
    """
    file, config, text = read_config(path)
    name = str(config.get("model_type") or "model")
    if not text.get("kv_lora_rank"):
        raise ConfigError(f"expected the config of an MLA model, with kv_lora_rank, found {name} without one in {file}")
    mixed = not text.get("layer_types") and any(key.startswith(LEFT_TO_DEFAULTS) for key in text)
    missing = [key for key in NEEDED if text.get(key) is None] + ["layer_types"] * mixed
    return _sizes(name, _completed(config, missing, file) if missing else text, file)


def read_config(path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The config.json in a directory, or the file that `path` is, what is in it, and what that says of the text model.

    Raises:
        ConfigError: no JSON object.
        OSError: no such file.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"expected JSON in {file}, found that {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"expected a JSON object in {file}, found {type(config).__name__}")
    return file, config, config["text_config"] if isinstance(config.get("text_config"), dict) else config


def _completed(config: dict[str, Any], missing: list[str], file: Path) -> dict[str, Any]:
    """The fields that transformers' config class has for this file."""
    lacking = f"expected {', '.join(missing)} in {file}, found none"
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(
            f"{lacking}; with transformers its defaults are known: pip install 'mla-compile[hf]'"
        ) from error
    fields = {key: value for key, value in config.items() if key != "model_type"}
    try:
        known = AutoConfig.for_model(config.get("model_type", ""), **fields).get_text_config()
    except ValueError as error:
        raise ConfigError(f"{lacking}; transformers does not know this model: {error}") from error
    found: dict[str, Any] = known.to_dict()
    found |= {key: getattr(known, key, None) for key in NEEDED if found.get(key) is None}  # some are properties
    if "num_hidden_layers" in missing and known.model_type == "longcat_flash":
        found["num_hidden_layers"] = 2 * known.num_layers  # of transformers 5.17 the model says so, not its config
    if unknown := [key for key in NEEDED if found[key] is None]:
        raise ConfigError(
            f"expected {', '.join(unknown)} in {file}, found none there and none in transformers' defaults"
        )
    return found


def _sizes(name: str, config: Mapping[str, Any], file: Path) -> ModelSizes:
    total = config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["full_attention"] * total
    owners = config.get("kv_source_layers") or range(total)
    own = {int(i): overrides for i, overrides in (config.get("per_layer_config") or {}).items()}
    found: Counter[Sizes] = Counter()
    for i, kind in enumerate(kinds):
        if not str(kind).startswith("linear") and owners[i] == i:
            found[_of_layer({**config, **own.get(i, {})}, str(kind), file)] += 1
    if not found:
        raise ConfigError(f"expected layers that keep latents in {file}, found none")
    index_width = config.get("index_head_dim") or 0
    indexers = config.get("indexer_types") or ["full"] * len(kinds)
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


def _of_layer(config: Mapping[str, Any], kind: str, file: Path) -> Sizes:
    widths = {short: config[key] for key, short in WIDTHS.items()}
    window = config.get("sliding_window") if kind.startswith("sliding") else None
    for key, short in WIDTHS.items():
        if not isinstance(widths[short], int) or widths[short] < (0 if short == "R" else 1):
            raise ConfigError(f"expected {key} in {file} to be a positive number, found {widths[short]!r}")
    return Sizes(**widths, window=window)
