"""On a GPU, each implementation that is installed and for that GPU agrees with the Triton kernel of this project."""

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("triton")

from mla_compile.kernels._common.machine import present
from mla_compile.kernels.expanded_attention.triton import expanded_attention_triton
from mla_compile.kernels.implementations import expansions, pages
from mla_compile.kernels.implementations.packages import found, is_installed
from mla_compile.kernels.implementations.table import EXPANDED, PAGED
from mla_compile.kernels.implementations.trial import disagreement
from mla_compile.kernels.paged_latent_attention.triton import paged_latent_attention_triton

from . import test_choose, test_cudnn

CASES = [(PAGED, each, heads) for each in PAGED.implementations for heads in (16, 128)]
CASES += [(EXPANDED, each, offset) for each in EXPANDED.implementations for offset in (None, 0, 30)]


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "each", "which"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_it_agrees_with_ours(op, each, which):
    machine = present(torch.device("cuda", 0))
    if not is_installed(each) or machine.arch not in each.architectures:
        pytest.skip(f"{each.name} is not installed, or not for {machine.arch}")
    if op is PAGED:
        made, small, ours = test_choose.problem(1, which), pages.small, paged_latent_attention_triton
    else:
        made = test_cudnn.problem(9, 60, heads=16, offset=which, workspace_tokens=1024)
        small, ours = expansions.small, expanded_attention_triton
    tensors = {name: value.cuda() for name, value in vars(made).items() if isinstance(value, torch.Tensor)}
    x = small(dataclasses.replace(made, **tensors))
    way = functools.partial(each.attend, found(each).module)
    assert disagreement(x, way, lambda x: ours(x, machine)) is None
