"""Ops of a graph on a GPU as launches of their Triton kernels, so that the compiler makes them and not Python.

A launch is planned while the graph is compiled: its tiles, parts and grid are numbers in the graph. An op stays one,
which plans at each call, where a size is a symbol, as tiles and parts are chosen by it, and where another project's
kernel computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ._common.suits import suits

Launch = Callable[..., tuple[Tensor, Tensor]]
"""Of an op's arguments o and lse; what it launches goes where `launched` says."""


@dataclass(frozen=True)
class _Launcher:
    """How an op is launched."""

    bundle: Callable[..., Any]
    caches: tuple[str, ...]
    """Arguments of which `suits` asks."""
    launch: Callable[[Any, Any], tuple[Tensor, Tensor]]
    """Of a bundle and a machine."""
    others: Any = None
    """What other projects have for the op, an `Op` of `implementations`."""


def launch_of(op: Any, arguments: Sequence[Any], named: Mapping[str, Any], *, ours_alone: bool) -> Launch | None:
    """What launches the kernels of an op that has these arguments, fake tensors on a GPU; None where it stays an op.

    Raises: KernelError, if the arguments do not fit the op.
    """
    launcher = _launchers().get(op)
    if launcher is None or not all(map(_is_known, (*arguments, *named.values()))):
        return None
    x = launcher.bundle(*arguments, **named)
    x.check()
    q = arguments[0]
    if not suits(q, *(getattr(x, name) for name in launcher.caches)):
        return None
    from ._common.machine import present
    from .implementations.choose import OURS, foreseen

    machine = present(q.device)
    if launcher.others is not None:
        choice = foreseen(launcher.others, x, machine, alone=ours_alone)
        if choice is None or choice.name != OURS:
            return None
    return lambda *given, **by_name: launcher.launch(launcher.bundle(*given, **by_name), machine)


@cache
def _launchers() -> dict[Any, _Launcher]:
    from .implementations.table import PAGED
    from .latent_attention.arguments import LatentAttention
    from .latent_attention.triton import latent_attention_triton
    from .merge_states.arguments import MergeStates
    from .merge_states.triton import merge_states_triton
    from .paged_latent_attention.arguments import PagedLatentAttention
    from .paged_latent_attention.triton import paged_latent_attention_triton
    from .sparse_latent_attention.arguments import SparseLatentAttention
    from .sparse_latent_attention.triton import sparse_latent_attention_triton

    rows, pages = ("latent", "k_rope"), ("latent_pages", "rope_pages")
    return {
        torch.ops.mla.latent_attention.default: _Launcher(LatentAttention, rows, latent_attention_triton),
        torch.ops.mla.sparse_latent_attention.default: _Launcher(
            SparseLatentAttention, rows, sparse_latent_attention_triton
        ),
        torch.ops.mla.paged_latent_attention.default: _Launcher(
            PagedLatentAttention, pages, paged_latent_attention_triton, PAGED
        ),
        torch.ops.mla.merge_states.default: _Launcher(MergeStates, (), lambda x, _: merge_states_triton(x)),
    }


def _is_known(argument: Any) -> bool:
    """Whether it holds no symbols."""
    numbers = (*argument.shape, *argument.stride()) if isinstance(argument, Tensor) else (argument,)
    return not any(isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) for number in numbers)
