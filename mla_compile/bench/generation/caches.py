"""Make empty caches for a whole model."""

from collections.abc import Callable
from typing import Any

import torch

from mla_compile.int4 import INT4

PAGE_SIZE = 64


def _dynamic(model: Any, batch: int, tokens: int) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _static(model: Any, batch: int, tokens: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=tokens)


def _latent(model: Any, batch: int, tokens: int) -> Any:
    from mla_compile import LatentCache

    return LatentCache.of(model, tokens)


def _pages(model: Any, batch: int, tokens: int) -> Any:
    from mla_compile import PagedLatentCache

    return PagedLatentCache.of(model, pages=batch * -(-tokens // PAGE_SIZE), page_size=PAGE_SIZE)


def _coded_pages(coded: torch.dtype) -> Callable[[Any, int, int], Any]:
    def pages(model: Any, batch: int, tokens: int) -> Any:
        from mla_compile import PagedLatentCache

        count = batch * -(-tokens // PAGE_SIZE)
        return PagedLatentCache.of(model, pages=count, page_size=PAGE_SIZE, dtype=coded)

    return pages


CACHES: dict[str, Callable[[Any, int, int], Any]] = {
    "dynamic": _dynamic,
    "static": _static,
    "latent": _latent,
    "pages": _pages,
    "fp8-pages": _coded_pages(torch.float8_e4m3fn),
    "int8-pages": _coded_pages(torch.int8),
    "int4-pages": _coded_pages(INT4),
}
"""Functions of a model, a number of sequences and a number of tokens that make an empty cache with that much room."""
