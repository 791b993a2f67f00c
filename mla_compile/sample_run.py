"""The sample run of a checkpoint for `explain` and `inspect`: a prompt, then one more token."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .cache.argument import cache_argument
from .errors import ConfigError
from .optional_packages import require

LONGEST_REASON = 300
"""Characters of another package's error that ours repeats: transformers' name all models that it knows."""


@dataclass(frozen=True)
class SampleRun:
    """A causal language model, a cache, and the tokens of its two calls."""

    model: Any
    cache: Any
    prefill: Tensor
    """`[1, tokens]`, int64"""
    decode: Tensor
    """`[1, 1]`, int64"""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of both calls besides their tokens."""
        return {cache_argument(self.model.forward): self.cache, "use_cache": True}

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A context for compiled calls of the model. If one fails, the prompt is tried without compilation.

        Raises:
            ConfigError: if that fails too: it is a fault of the model, whose error says more than a compiler's.
        """
        try:
            yield
        except Exception:
            try:
                with torch.no_grad():
                    self.model(self.prefill)
            except Exception as error:
                tokens, found = self.prefill.shape[1], f"{type(error).__name__}: {_shortened(error)}"
                raise ConfigError(f"expected a model that reads {tokens} tokens, found: {found}") from error
            raise


def load(name: str, tokens: int, user: str, cache_kind: Literal["dynamic", "static"] = "dynamic") -> SampleRun:
    """Load a model by AutoModelForCausalLM, and make a prompt of `tokens` random tokens.

    Raises:
        ConfigError: if transformers cannot make a causal language model of it.
        ImportError: if transformers is not installed, naming the extra and the `user`, or the model needs more.
        OSError: if there is no such model.
    """
    require("transformers", "hf", user)
    import transformers

    if not Path(name).exists() and (Path(name).is_absolute() or name.startswith((".", "~"))):
        raise FileNotFoundError(f"expected the folder of a model, or its name on the hub, found no folder {name}")
    if Path(name).is_file():
        raise NotADirectoryError(f"expected the folder of a model, or its name on the hub, found the file {name}")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(name)
    except (ImportError, OSError):
        raise
    except Exception as error:  # of transformers, huggingface_hub or safetensors: they have no base class in common
        found = _shortened(error)
        raise ConfigError(f"expected a causal language model of transformers in {name}, found: {found}") from error
    config = model.config
    ids = torch.randint(config.get_text_config().vocab_size, (1, tokens + 1))
    cache = (
        transformers.DynamicCache(config=config)
        if cache_kind == "dynamic"
        else transformers.StaticCache(config=config, max_cache_len=tokens + 1)
    )
    return SampleRun(model, cache, ids[:, :tokens], ids[:, tokens:])


def _shortened(error: Exception) -> str:
    return textwrap.shorten(str(error), LONGEST_REASON, placeholder=" ...")
