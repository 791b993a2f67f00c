"""Read the fields of a config.json. Every value that a command uses is checked here first."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

LARGEST = 2**31 - 1
"""The greatest size that a field may say. No model comes near it, and products of several such sizes fit into a float.
"""
MOST_LAYERS = 10_000
"""The greatest number of layers, each of which is looked at."""


@dataclass(frozen=True)
class Fields:
    """Fields of a config, and the file that they come from. What raises, raises a ConfigError that names both."""

    values: Mapping[str, Any]
    file: Path

    def __call__(self, key: str, least: int = 1, most: int = LARGEST) -> int:
        """A whole number of at least `least`, 0 or 1, and at most `most`."""
        value: Any = self.values.get(key)
        if not is_count(value, least):
            raise self.wrong(key, "a positive whole number" if least else "a whole number")
        if value > most:
            raise self.wrong(key, f"at most {most:,}")
        return int(value)

    def given(self, key: str) -> int:
        """A positive whole number that may be missing, null or 0, which are 0."""
        return self(key) if self.values.get(key) else 0

    def first(self, *keys: str) -> int:
        """The same of the first of several names that has such a number; 0 if none has."""
        return next((self(key) for key in keys if self.values.get(key)), 0)

    def flag(self, key: str) -> bool:
        """Whether something is so; a field that is missing or null says that it is not."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def name(self, key: str) -> str:
        """A name that can be printed; empty if the field is missing or null."""
        value = self.values.get(key)
        if value is not None and not (isinstance(value, str) and value.isprintable()):
            raise self.wrong(key, "a name")
        return value or ""

    def part(self, key: str) -> Fields:
        """The fields of an object in the config; none if the field is missing, null or empty."""
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value, self.file)

    def layers(self) -> int:
        """The number of layers."""
        return self("num_hidden_layers", most=MOST_LAYERS)

    def of_each_layer(self, key: str) -> Sequence[Any] | None:
        """A list with an entry for each layer, if the config has it."""
        found, layers = self.values.get(key), self.layers()
        if not found or (isinstance(found, list | tuple) and len(found) == layers):
            return found or None
        told = f"{len(found)} entries" if isinstance(found, list | tuple) else reprlib.repr(found)
        raise ConfigError(f"expected {key} in {self.file} to have an entry for each of {layers} layers, found {told}")

    def per_layer(self) -> list[Fields]:
        """The fields of each layer: those of the model, but what `per_layer_config` says of the layer by its number."""
        layers, own = self.layers(), self.part("per_layer_config").values
        overrides = {int(i): values for i, values in own.items() if str(i).isdecimal()}  # transformers pads: "02"
        known = len(overrides) == len(own) and all(i in range(layers) for i in overrides)
        if not known or not all(isinstance(values, dict) for values in overrides.values()):
            raise self.wrong("per_layer_config", f"objects by the numbers of layers, 0 to {layers - 1}")
        return [Fields({**self.values, **overrides.get(i, {})}, self.file) for i in range(layers)]

    def with_values(self, values: Mapping[str, Any]) -> Fields:
        """The same, with other values for some fields."""
        return Fields({**self.values, **values}, self.file)

    def wrong(self, key: str, expected: str) -> ConfigError:
        """The error for a field that is not as expected."""
        return ConfigError(
            f"expected {key} in {self.file} to be {expected}, found {reprlib.repr(self.values.get(key))}"
        )


def is_count(value: object, least: int = 1) -> bool:
    """Whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def read_config(path: Path) -> tuple[Fields, Fields]:
    """Read a config, `path` or the config.json in it: all fields, and those of the text model.

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
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    return Fields(config, file), Fields(text, file)
