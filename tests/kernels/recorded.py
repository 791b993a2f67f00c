"""Record launches of Triton kernels instead of making them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without values, on the meta device."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    kernel: str
    """The kernel's name."""
    function: Any
    """The function that was launched."""
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    """The arguments given by name: the kernel's constants and the compiler's options."""


class _Recorded:
    """Takes the place of a kernel, and records its launches."""

    def __init__(self, name: str, function: Any, launches: list[Launch]) -> None:
        self._of, self._launches = (name, function), launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self._launches.append(Launch(*self._of, grid, arguments, constants))


@contextlib.contextmanager
def recorded(arch: str = "sm_90") -> Iterator[list[Launch]]:
    """The launches of this project's kernels within the context, on an imagined machine; tensors need no values."""
    from mla_compile.asked import OURS, kept_to
    from mla_compile.kernels._common import launch, machine
    from mla_compile.kernels.append_latents import triton as append_launcher
    from mla_compile.kernels.backward import triton as backward_launcher
    from mla_compile.kernels.expanded_attention import triton as expanded_launcher
    from mla_compile.kernels.merge_states import triton as merge_launcher
    from mla_compile.kernels.paged_expanded_attention import triton as gather_launcher
    from mla_compile.kernels.paged_latent_attention import gluon
    from mla_compile.kernels.sparse_latent_attention import gluon as gluon_of_names

    launches: list[Launch] = []
    kernels = [(launch, "attend_latents"), (launch, "combine"), (append_launcher, "append")]
    kernels += [(expanded_launcher, "attend_chunk"), (merge_launcher, "merge"), (gather_launcher, "gather_chunk")]
    kernels += [(backward_launcher, name) for name in ("add_to_queries", "add_to_keys")]
    of_gluon = (
        "share_out",
        "attend_key_rows",
        "attend_coded_key_rows",
        "attend_by_coded_warp_groups",
        "attend_by_warp_groups",
        "attend_in_tensor_memory",
    )
    kernels += [*((gluon, name) for name in (*of_gluon, "combine")), (gluon_of_names, "attend_named")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_to(OURS))  # others would be tried, which takes values
        for module, name in kernels:
            stack.enter_context(mock.patch.object(module, name, _Recorded(name, getattr(module, name), launches)))
        stack.enter_context(mock.patch.object(machine, "present", return_value=machine.Machine(arch, 132)))
        stack.enter_context(mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()))
        yield launches
