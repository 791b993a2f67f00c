"""What `explain` and `inspect` run of a checkpoint: a prompt, and one further token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .optional_packages import require


@dataclass(frozen=True)
class SampleRun:
    """A causal language model with a cache and its two calls."""

    model: Any
    cache: Any
    prefill: Tensor
    """`[1, tokens]`, int64"""
    decode: Tensor
    """`[1, 1]`, int64"""

    @property
    def arguments(self) -> dict[str, Any]:
        """What both calls get besides their tokens."""
        return {"past_key_values": self.cache, "use_cache": True}


def load(name: str, tokens: int, user: str, cache_kind: Literal["dynamic", "static"] = "dynamic") -> SampleRun:
    """A model that AutoModelForCausalLM can load, and a prompt of `tokens` random tokens.

    Raises: ImportError, naming the extra and the `user`, without transformers.
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
