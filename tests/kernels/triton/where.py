"""Where the Triton kernels run: on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU."""

import os

import pytest
import torch

from mla_compile.kernels._common.machine import Machine, present

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ON_GPU = () if INTERPRETED else (pytest.mark.gpu,)
"""The marks of each test module in this folder."""


def machine() -> Machine:
    """The present GPU; for the interpreter a small imagined one, so that small problems are cut into several parts."""
    return Machine("sm_90", 4) if INTERPRETED else present(torch.device("cuda", torch.cuda.current_device()))


def to_device(tensors):
    """Tensors (and None) on the device of the run, with their strides; those that share memory share it there too."""
    moved = {}
    return [t if t is None else _like(t, moved) for t in tensors]


def _like(tensor: torch.Tensor, moved: dict[int, torch.Tensor]) -> torch.Tensor:
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in moved:
        moved[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).to(DEVICE)
    memory = moved[storage.data_ptr()]
    whole = memory[: len(memory) // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
