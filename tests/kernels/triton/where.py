"""Where the Triton kernels run: on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU."""

import os

import pytest
import torch

from mla_compile.kernels._common.machine import Machine, present

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ON_GPU = () if INTERPRETED else (pytest.mark.gpu,)
"""The marks of a test module of this folder."""


def machine() -> Machine:
    """The GPU that there is; a small imagined one for the interpreter, so that small problems have several parts."""
    return Machine("sm_90", 4) if INTERPRETED else present(torch.device("cuda", torch.cuda.current_device()))


def to_device(tensors):
    """Tensors (and None) on the device of the run, with their strides."""
    return [t if t is None else _like(t) for t in tensors]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.new_empty(0).set_(tensor.untyped_storage()).to(DEVICE)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
