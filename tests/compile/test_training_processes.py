"""Two gloo processes train one model: gradients are averaged, or sharded, as torch does it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mla_compile
from mla_compile.options import KEEP_ALL, QUERIES
from tests.adapters import adapt
from tests.compile.layers import Layer
from tests.distributed.processes import in_processes
from tests.models import HIDDEN, Combined
from tests.without_codegen import without_codegen

WIDE = 12000
"""Columns of a projection whose weights fill a bucket of gradients by themselves: DDP cuts the graph there."""


class Model(nn.Module):
    """Two layers, and a wide MLP between them."""

    def __init__(self, *adapted: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.wide = nn.Sequential(nn.Linear(HIDDEN, WIDE), nn.ReLU(), nn.Linear(WIDE, HIDDEN))
        for layer in self.layers:
            layer.mla = Combined(True)
            adapt(layer.mla, *adapted)

    def forward(self, x):
        x = x + self.layers[0](x)
        x = x + self.wide(x)
        return x + self.layers[1](x)


@without_codegen()
def _train(way: str, adapted: tuple[str, ...], recompute: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model(*adapted)
    plain, batches = copy.deepcopy(model), torch.randn(2, 2, 13, HIDDEN)
    for batch in batches:
        (plain(batch).square().mean() / 2).backward()
    if way == "fsdp":
        for part in (*model.layers, model):
            fully_shard(part)
    wrapped = model if way == "fsdp" else DistributedDataParallel(model, bucket_cap_mb=1)
    options = {"mla.recompute": recompute}
    torch.compile(wrapped, backend="mla", options=options)(batches[rank]).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.requires_grad == theirs.requires_grad
        if not ours.requires_grad:
            assert ours.grad is None
            continue
        gradient = ours.grad.full_tensor() if way == "fsdp" else ours.grad
        torch.testing.assert_close(gradient, theirs.grad, rtol=1e-4, atol=1e-6)
    reports = mla_compile.reports()
    assert sum(report.rewritten for report in reports) == 2
    if recompute == QUERIES:
        assert all(site.reason.endswith("and so are queries") for report in reports for site in report.sites)
    assert len(reports) > 1  # the graph was cut
    dist.barrier()


@pytest.mark.parametrize(
    ("adapted", "recompute"),
    [
        pytest.param((), KEEP_ALL, marks=pytest.mark.slow, id="all weights"),
        pytest.param(("kv_b_proj", "o_proj"), QUERIES, id="adapters, queries again"),
    ],
)
@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_train_as_one(way, adapted, recompute):
    in_processes(_train, 2, way, adapted, recompute)
