"""The Triton kernels read and write caches whose offsets do not fit into 32 bits."""

import importlib

import pytest
import torch

from mla_compile.kernels._common.tiles import Tiles
from mla_compile.kernels.append_latents.arguments import AppendLatents
from mla_compile.kernels.append_latents.triton import append_latents_triton

from ..bundles import BUNDLES
from ..far import CASES, append_case, attention_case
from .where import ON_GPU, machine, to_device

pytestmark = [*ON_GPU]

TILES = Tiles(rows=16, keys=16, warps=4, stages=2)


def on_device(arguments):
    moved = iter(to_device([a for a in arguments if isinstance(a, torch.Tensor)]))
    return [next(moved) if isinstance(a, torch.Tensor) else a for a in arguments]


@pytest.mark.parametrize(("op", "dim"), CASES)
def test_attention(op, dim):
    launch = getattr(importlib.import_module(f"mla_compile.kernels.{op}.triton"), f"{op}_triton")
    given = [on_device(arguments) for arguments in attention_case(op, dim, torch.float16, tokens=100)]
    near, far = (launch(BUNDLES[op](*arguments), machine(), TILES) for arguments in given)
    for a, b in zip(near, far, strict=True):
        assert not a.isnan().any()
        assert torch.equal(a, b)


@pytest.mark.parametrize("one_scale", [False, True])
def test_append(one_scale):
    near, far = (on_device(arguments) for arguments in append_case(one_scale))
    for arguments in (near, far):
        append_latents_triton(AppendLatents(*arguments))
    assert near[3].view(torch.uint8).any()
    assert torch.equal(near[3].view(torch.uint8), far[3].view(torch.uint8))
