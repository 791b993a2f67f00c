"""Two gloo processes train one model: gradients are averaged, or sharded, as torch does it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mla_compile
from mla_compile import backend
from tests.compile.test_training import Layer
from tests.interpreted import interpreted
from tests.models import HIDDEN

WIDE = 12000
"""Columns of a projection whose weights fill a bucket of gradients by themselves: DDP cuts the graph there."""


class Model(nn.Module):
    """Two layers and what is wide between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.wide = nn.Sequential(nn.Linear(HIDDEN, WIDE), nn.ReLU(), nn.Linear(WIDE, HIDDEN))

    def forward(self, x):
        x = x + self.layers[0](x)
        x = x + self.wide(x)
        return x + self.layers[1](x)


def _train(rank: int, way: str, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    backend.compile_fx_inner = interpreted
    torch.manual_seed(0)
    model = Model()
    plain, batches = copy.deepcopy(model), torch.randn(2, 2, 13, HIDDEN)
    for batch in batches:
        (plain(batch).square().mean() / 2).backward()
    if way == "fsdp":
        for part in (*model.layers, model):
            fully_shard(part)
    wrapped = model if way == "fsdp" else DistributedDataParallel(model, bucket_cap_mb=1)
    torch.compile(wrapped, backend="mla")(batches[rank]).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if way == "fsdp" else ours.grad
        torch.testing.assert_close(gradient, theirs.grad, rtol=1e-4, atol=1e-6)
    assert sum(report.rewritten for report in mla_compile.reports()) == 2
    assert len(mla_compile.reports()) > 1  # the graph was cut
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_train_as_one(way, tmp_path):
    mp.spawn(_train, args=(way, str(tmp_path)), nprocs=2)
