"""Operands of a library's matrix products are finite around the Triton kernels too, in the same problems as on CPU.

Only chunked attention calls such products: the other kernels multiply by themselves.
"""

import pytest
import torch

from mla_compile.kernels._common.tiles import Tiles
from mla_compile.kernels.expanded_attention.arguments import ExpandedAttention
from mla_compile.kernels.expanded_attention.triton import expanded_attention_triton
from mla_compile.kernels.paged_expanded_attention.arguments import PagedExpandedAttention
from mla_compile.kernels.paged_expanded_attention.triton import paged_expanded_attention_triton

from ..poison import assert_the_same
from ..unseen import MAKE
from .where import ON_GPU, machine, to_device

pytestmark = [*ON_GPU]

TILES = Tiles(rows=16, keys=16, warps=4, stages=2)
CHUNKED = {name: make for name, make in MAKE.items() if name.startswith(("expanded", "paged expanded"))}
del CHUNKED["expanded, many queries"]  # takes minutes, and runs the same code as few queries
MASKS = [name for name in CHUNKED if name.startswith("expanded, ")]
SLOW = [name for i, name in enumerate(MASKS) if i % 4]
SLOW += ["paged expanded, queries that are not the last", "paged expanded, a mask"]
SOME = [pytest.param(make, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, make in CHUNKED.items()]
"""All problems; slow are three of four masks of a dense cache, and what other problems have together with padding."""


def compute(problem):
    tensors = to_device([t if isinstance(t, torch.Tensor) else None for t in problem.arguments])
    arguments = [given if t is None else t for t, given in zip(tensors, problem.arguments, strict=True)]
    if problem.op == "expanded_attention":
        return expanded_attention_triton(ExpandedAttention(*arguments), machine(), TILES)
    more = to_device([problem.more[name] for name in ("mask", "first_positions", "query_lens")])
    return paged_expanded_attention_triton(PagedExpandedAttention(*arguments, None, *more), machine(), TILES)


@pytest.mark.parametrize("make", SOME)
def test_chunks(make, poisoned_memory):
    torch.manual_seed(0)
    expected = compute(make(torch.bfloat16, 0.0))
    torch.manual_seed(0)
    problem = make(torch.bfloat16, torch.nan)
    before = poisoned_memory.products
    actual = compute(problem)
    assert poisoned_memory.products > before
    assert expected[0].isfinite().all()
    assert_the_same(actual, expected)
