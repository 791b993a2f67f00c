"""Whole models in DeepSeek's sizes, with few layers, all dense, and a cache with tokens; all tensors are fake."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mla_compile import BlockTable, PagedLatentCache, PagePool

ROOT = Path(__file__).parents[2]
L, R = 512, 64
CONTEXT, ROOM, PAGE_SIZE = 4096, 8192, 64
"""Tokens of each sequence before the step, the capacity of a cache that does not grow, and tokens per page."""
DTYPE = torch.bfloat16

SIZES: dict[str, Any] = {
    "v2-lite": {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "intermediate_size": 10944,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    "v3": {"hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536, "intermediate_size": 18432},
}
CONFIGS = {"v2-lite": transformers.DeepseekV2Config, "v3": transformers.DeepseekV3Config}
"""DeepSeek-V2's rope has complex factors."""


@dataclass(frozen=True)
class Case:
    """A step of a model."""

    model: str
    """One of `SIZES`, or the file of an example with pages."""
    cache: str
    """One of `CACHES`."""
    batch: int
    tokens: int
    """New tokens of each sequence in this step, after `CONTEXT` others."""
    layers: int = 2
    any_size: bool = False
    """Whether it is compiled for any number of sequences and of tokens before the step."""
    frozen: bool = False
    """Whether parameters are constants of the code, by Inductor's `freezing`."""
    recorded: bool = False
    """Whether it is compiled for CUDA graphs, by `mode="reduce-overhead"`."""

    @property
    def name(self) -> str:
        sizes = f"batch {self.batch} tokens {self.tokens}"
        asked = f"{' of any size' * self.any_size}{' frozen' * self.frozen}{' recorded' * self.recorded}"
        return f"{self.model} {self.cache} {sizes}{asked}"


def model_of(case: Case) -> nn.Module:
    """The model with fake parameters."""
    sizes = SIZES[case.model] | {"num_hidden_layers": case.layers, "first_k_dense_replace": case.layers}
    heads = {"num_key_value_heads": sizes["num_attention_heads"], "kv_lora_rank": L, "qk_rope_head_dim": R}
    config = CONFIGS[case.model](**sizes, **heads, vocab_size=1024, dtype=DTYPE)
    with unset_fake_temporarily(), torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    own[name] = nn.Parameter(fake, requires_grad=False) if own is module._parameters else fake
    return model


def _tokens(case: Case, count: int) -> tuple[Tensor, Tensor]:
    sizes = ((case.batch, 1, count, width) for width in (L, R))
    latent, k_rope = (torch.empty(size, dtype=DTYPE, device="cuda") for size in sizes)
    return latent, k_rope


def _dynamic(case: Case, model: Any) -> Any:
    cache = transformers.DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.keys, layer.values = _tokens(case, CONTEXT)
        layer.dtype, layer.device, layer.is_initialized = DTYPE, layer.keys.device, True
    return cache


def _static(case: Case, model: Any) -> Any:
    cache = transformers.StaticCache(config=model.config, max_cache_len=ROOM)
    for layer in cache.layers:
        # Made on the device, since a tensor with a value could not be moved there.
        layer.cumulative_length = torch.zeros((), dtype=torch.int64, device="cuda")
        layer.lazy_initialization(*_tokens(case, 1))
    return cache


def _pages(dtype: torch.dtype | None) -> Callable[[Case, Any], Any]:
    def made(case: Case, model: Any) -> Any:
        cache = PagedLatentCache.of(model, case.batch * ROOM // PAGE_SIZE, PAGE_SIZE, dtype)
        cache.max_pages = ROOM // PAGE_SIZE
        cache._table = BlockTable(cache.pool, case.batch, cache.max_pages)
        cache._table.extend(CONTEXT)
        return cache

    return made


def _fixed(case: Case, model: Any) -> Any:
    return PagedLatentCache.of(model, case.batch * ROOM // PAGE_SIZE, PAGE_SIZE, batch=case.batch, tokens=ROOM)


CACHES: dict[str, Callable[[Case, Any], Any]] = {
    "dynamic": _dynamic,
    "static": _static,
    "pages": _pages(None),
    "fixed pages": _fixed,
    "fp8 pages": _pages(torch.float8_e4m3fn),
}


def call_of(case: Case) -> Callable[[], Any]:
    """One step, compiled at its first call."""
    if case.model not in SIZES:
        return _example(ROOT / case.model, case)
    model = model_of(case)
    cache = CACHES[case.cache](case, model)
    ids = torch.zeros(case.batch, case.tokens, dtype=torch.int64, device="cuda")
    mode = "reduce-overhead" if case.recorded else None
    compiled = torch.compile(model, backend="mla", dynamic=case.any_size, mode=mode)
    return lambda: compiled(ids, past_key_values=cache, use_cache=True)


def _example(path: Path, case: Case) -> Callable[[], Any]:
    """One step of the layer of `examples/paged.py`, over a `PagePool`."""
    with torch.device("cuda"):
        layer = runpy.run_path(str(path))["PagedMLA"]().requires_grad_(False)
        lengths = torch.empty(case.batch, dtype=torch.int64)
        table = torch.empty(case.batch, ROOM // PAGE_SIZE, dtype=torch.int64)
    pool = PagePool(1, layer.L, layer.R, case.batch * ROOM // PAGE_SIZE, PAGE_SIZE, device="cuda")
    x = torch.empty(case.batch, case.tokens, 256, device="cuda")
    compiled = torch.compile(layer, backend="mla", dynamic=False, fullgraph=True)
    return lambda: compiled(x, pool.layers[0], table, lengths)
