"""Run a function in several processes, which form a gloo group."""

import multiprocessing
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed
import torch.multiprocessing

_PRELOADED = [
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "mla_compile.backend",
    "mla_compile.kernels.register",
]
"""Modules that take long to import: the process that the others are forked from imports them once."""


def in_processes(function, ranks, *arguments):
    """What `function(*arguments)` returns on each rank, in order; each rank is a process."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        of_all = (ranks, folder, function, arguments)
        torch.multiprocessing.start_processes(_one, of_all, nprocs=ranks, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]


def _one(rank, ranks, folder, function, arguments):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(function(*arguments), Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()
