"""A function in several processes of one gloo group."""

import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed
import torch.multiprocessing


def in_processes(function, ranks, *arguments):
    """What `function(*arguments)` returns on each of some ranks, which have one process each, in order."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_one, (ranks, folder, function, arguments), nprocs=ranks)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]


def _one(rank, ranks, folder, function, arguments):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(function(*arguments), Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()
