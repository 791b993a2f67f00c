"""Prepare the C++ kernels that compiled graphs call on CPU, while Inductor compiles the graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ..coded import HELD
from ..cpu_products import has_products
from ..fp8 import FP8
from ..int4 import PACKED
from ..int8 import INT8
from . import dispatcher
from .backward import native as backward
from .expanded_attention import native as expanded_attention
from .index_scores import native as index_scores
from .latent_attention import cached
from .native import TYPES, dtype_of_keys
from .per_head_matmul import native as per_head_matmul
from .widened_matmul import native as widened_matmul

_MAY_BE = {FP8: (FP8, torch.uint8), INT8: (INT8,), PACKED: (PACKED,)}
"""For each dtype of coded latents, the dtypes of graph inputs that may be such a cache: FP8 is also passed as its
bytes."""


def begin(dtypes: Iterable[torch.dtype]) -> None:
    """Start compiling in the background what `make_ready` waits for; what is on disk already is ready at once."""
    dispatcher.begin()
    dtypes = list(dtypes)
    for triple in of_attention(dtypes):
        cached.KERNELS.begin(*triple)
    for dtype in of_numbers(dtypes):
        expanded_attention.KERNELS.begin(dtype)
        per_head_matmul.KERNELS.begin(dtype)
        if not has_products(dtype):
            widened_matmul.KERNELS.begin(dtype)


def make_ready(dtypes: Iterable[torch.dtype]) -> None:
    """Let torch call the kernels for tensors of these dtypes without Python, provided there is a compiler."""
    dtypes = list(dtypes)
    for triple in of_attention(dtypes):
        dispatcher.provide("latent_attention", triple, cached.KERNELS.of(*triple))
    for dtype in of_numbers(dtypes):
        dispatcher.provide("per_head_matmul", (dtype,), per_head_matmul.KERNELS.of(dtype))
        if not has_products(dtype):
            dispatcher.provide("widened_matmul", (dtype,), widened_matmul.KERNELS.of(dtype))
        of_chunks = expanded_attention.KERNELS.of(dtype)
        if of_chunks is not None:
            dispatcher.provide("expanded_attention", (dtype, dtype_of_keys(of_chunks, dtype)), of_chunks)


def begin_indexers(dtypes: Iterable[torch.dtype]) -> None:
    """Start compiling in the background what the first call of a graph with an indexer waits for."""
    for dtype in of_numbers(dtypes):
        index_scores.KERNELS.begin(dtype)


def begin_training(dtypes: Iterable[torch.dtype]) -> None:
    """Start compiling in the background what the first call of a graph that needs gradients, and its backward, wait
    for. torch's dispatcher, which takes longest to compile, is left to Python there."""
    for dtype in of_numbers(dtypes):
        expanded_attention.KERNELS.begin(dtype)
        backward.KERNELS.begin(dtype)


def of_numbers(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Those of the dtypes that queries may have and a kernel supports."""
    return [dtype for dtype in dict.fromkeys(dtypes) if dtype in TYPES and dtype not in HELD]


def of_attention(dtypes: list[torch.dtype]) -> Iterator[tuple[torch.dtype, torch.dtype, torch.dtype]]:
    """The combinations of dtypes of queries, latents and rope keys that graphs of these dtypes may call."""
    for dtype in of_numbers(dtypes):
        yield dtype, dtype, dtype
        for coded, given in _MAY_BE.items():
            if any(one in dtypes for one in given):
                yield dtype, coded, dtype
                if coded != PACKED:
                    yield dtype, coded, coded
