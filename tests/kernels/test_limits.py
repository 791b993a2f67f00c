"""Limits that the dispatcher in C++ shares with Python are the same in both."""

import re
from pathlib import Path

import pytest
import torch

from mla_compile.cpu_products import has_products
from mla_compile.inductor import growing_caches
from mla_compile.kernels import dispatcher
from mla_compile.kernels.expanded_attention import chunks
from mla_compile.kernels.latent_attention import cached, many_queries
from mla_compile.kernels.per_head_matmul import native as per_head
from mla_compile.kernels.widened_matmul import aten as panels
from mla_compile.kernels.widened_matmul import native as streamed

FOLDER = Path(dispatcher.__file__).parents[1]
ROWS = [32, 64]  # without AVX-512, and with it: the preprocessor chooses
LIMITS = {
    ("dispatcher/cached.h", "MOST_ROWS_OF_ATTENTION"): [cached.MOST_ROWS],
    ("dispatcher/many_queries.h", "KEYS_AT_A_TIME"): [many_queries._TOKENS],
    ("dispatcher/many_queries.h", "FEWEST_KEYS"): [many_queries._FEW_TOKENS],
    ("dispatcher/many_queries.h", "ROWS_OF_A_THREAD"): [many_queries._ROWS_OF_A_THREAD],
    ("dispatcher/expanded_attention.h", "HEADS_AT_A_TIME"): [chunks.HEADS],
    ("dispatcher/expanded_attention.h", "CACHE_LINE"): [many_queries._GAP],
    ("dispatcher/per_head_matmul.h", "MOST_ROWS_OF_MATMUL"): [per_head._MOST_ROWS],
    ("dispatcher/per_head_matmul.h", "MOST_ROWS_ALONE"): [per_head._MOST_ROWS_ALONE],
    ("dispatcher/widened_matmul.h", "PANEL_BYTES"): [panels.PANEL_BYTES],
    ("dispatcher/widened_matmul.h", "FEWEST_COLUMNS"): [panels._FEWEST_COLUMNS],
    ("dispatcher/grow_cache.h", "LEAST_TO_USE_AGAIN"): [growing_caches.LEAST_BYTES],
    ("widened_matmul/call.h", "MOST_ROWS_TO_STREAM"): ROWS,
}


def values_in(text: str, name: str) -> list[int]:
    """The values of a constant, `a` or `a << b`, wherever a header defines it."""
    found = re.findall(rf"\b{name} = (?:size_t\{{)?(\d+)\}}?(?: << (\d+))?", text)
    return sorted(int(value) << int(shift or 0) for value, shift in found)


@pytest.mark.parametrize(("header", "name"), LIMITS, ids=[name for _, name in LIMITS])
def test_the_dispatcher_has_the_limits_of_python(header, name):
    assert values_in((FOLDER / header).read_text(), name) == LIMITS[header, name]


def test_streamed_rows_are_those_of_this_cpu():
    assert ROWS[torch.cpu._is_avx512_supported()] == streamed.MOST_ROWS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_of_as_many_rows_as_in_python_run_none(no_python, dtype):
    most = per_head._MOST_ROWS if has_products(dtype) else per_head._MOST_ROWS_ALONE
    weight = torch.randn(3, 16, 24, dtype=dtype)
    torch.ops.mla.per_head_matmul(torch.randn(1, most, 3, 16, dtype=dtype), weight)
    with pytest.raises(AssertionError, match="the general implementation was called"):
        torch.ops.mla.per_head_matmul(torch.randn(1, most + 1, 3, 16, dtype=dtype), weight)
