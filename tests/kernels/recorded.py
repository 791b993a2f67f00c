"""Launches of Triton kernels that are noted and not made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without values."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Launch:
    """One call of a kernel."""

    kernel: str
    """Its name."""
    function: Any
    """What was launched."""
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    """With the compiler's options: all that is given by name."""


class _Recorded:
    """In the place of a kernel."""

    def __init__(self, name: str, function: Any, launches: list[Launch]) -> None:
        self._of, self._launches = (name, function), launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self._launches.append(Launch(*self._of, grid, arguments, constants))


@contextlib.contextmanager
def recorded(arch: str = "sm_90") -> Iterator[list[Launch]]:
    """All launches of this project's kernels within it, on a machine of an architecture; tensors need no values."""
    from mla_compile.kernels._common import launch, machine
    from mla_compile.kernels.append_latents import triton as append_launcher
    from mla_compile.kernels.expanded_attention import triton as expanded_launcher
    from mla_compile.kernels.merge_states import triton as merge_launcher
    from mla_compile.kernels.paged_expanded_attention import triton as gather_launcher
    from mla_compile.kernels.paged_latent_attention import gluon

    launches: list[Launch] = []
    kernels = [(launch, "attend_latents"), (launch, "combine"), (append_launcher, "append")]
    kernels += [(expanded_launcher, "attend_chunk"), (merge_launcher, "merge"), (gather_launcher, "gather_chunk")]
    kernels += [(gluon, name) for name in ("share_out", "attend_by_warp_groups", "attend_in_tensor_memory", "combine")]
    with contextlib.ExitStack() as stack:
        for module, name in kernels:
            stack.enter_context(mock.patch.object(module, name, _Recorded(name, getattr(module, name), launches)))
        stack.enter_context(mock.patch.object(machine, "present", return_value=machine.Machine(arch, 132)))
        stack.enter_context(mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()))
        yield launches
