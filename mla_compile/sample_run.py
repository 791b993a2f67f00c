"""The sample run of a checkpoint for `explain` and `inspect`: a prompt, then one more token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .cache.argument import cache_argument
from .optional_packages import require


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


def load(name: str, tokens: int, user: str, cache_kind: Literal["dynamic", "static"] = "dynamic") -> SampleRun:
    """Load a model by AutoModelForCausalLM, and make a prompt of `tokens` random tokens.

    Raises: ImportError, naming the extra and the `user`, if transformers is not installed.
    """
    require("transformers", "hf", user)
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(name)
    config = model.config
    ids = torch.randint(config.get_text_config().vocab_size, (1, tokens + 1))
    cache = (
        transformers.DynamicCache(config=config)
        if cache_kind == "dynamic"
        else transformers.StaticCache(config=config, max_cache_len=tokens + 1)
    )
    return SampleRun(model, cache, ids[:, :tokens], ids[:, tokens:])
