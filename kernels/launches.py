"""Replace ops of a graph on a GPU by launches of their Triton kernels, so that compiled code, not Python, makes them.

A launch is planned while the graph is compiled: its tiles and parts are numbers in the graph, and its grid is a number
or an expression in symbols. Symbols may stand for the number of sequences, queries and keys, and for strides. An op is
kept, and plans at each call, where another project's kernel computes it. Kernels are compiled for one page size: a
symbolic one is guarded to keep its present value; where no guards can be added, the op is kept. Where each sequence has
one page, as in a static cache, the kernel takes any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ._common.sizes import is_expected, is_symbol
from ._common.suits import suits

Launch = Callable[..., tuple[Tensor, Tensor]]
"""From an op's arguments to o and lse; what it launches goes where `launched` says."""


@dataclass(frozen=True)
class _Launcher:
    """How an op is launched."""

    bundle: Callable[..., Any]
    caches: tuple[str, ...]
    """Names of the arguments that `suits` checks beside the query."""
    launch: Callable[[Any, Any], tuple[Tensor, Tensor]]
    """From a bundle and a machine to o and lse."""
    others: Any = None
    """Other projects' kernels for the op, an `Op` of `implementations`."""
    is_for_a_page_size: Callable[[Any], bool] = lambda _: False
    """Whether the kernel for a bundle is compiled for the size of a page, the second dim of its caches."""


def launch_of(
    op: Any, arguments: Sequence[Any], named: Mapping[str, Any], kernels: str, *, guards: bool, recorded: bool = False
) -> Launch | None:
    """The launcher for an op with these arguments, fake tensors on a GPU, or None where it stays an op.

    `kernels` is the value of the option `mla.kernels`; `recorded` says whether a CUDA graph records the launches. With
    `guards`, a symbolic page size is specialised to its present value, under a guard. Raises: KernelError, if the
    arguments do not fit the op.
    """
    launcher = _launchers().get(op)
    if launcher is None:
        return None
    x = launcher.bundle(*arguments, **named)
    q, caches = arguments[0], [getattr(x, name) for name in launcher.caches]
    if not all(map(is_expected, _numbers((*arguments, *named.values())))):
        return None
    page_sizes = [rows.shape[1] for rows in caches] if launcher.is_for_a_page_size(x) else []
    if guards:
        page_sizes = [int(size) for size in page_sizes]
    if any(map(is_symbol, (*page_sizes, *_planned_by(q, caches)))):
        return None
    x.check()
    if not suits(q, *caches):
        return None
    from ._common.machine import present
    from ._common.tiles import takes

    machine = present(q.device)
    widths = [rows.shape[-1] for rows in caches]
    if widths and not takes(machine, widths[0], widths[1], q.itemsize):
        return None
    if launcher.others is not None and not _is_ours(launcher.others, x, machine, kernels, recorded):
        return None
    return lambda *given, **by_name: launcher.launch(launcher.bundle(*given, **by_name), machine)


@cache
def _launchers() -> dict[Any, _Launcher]:
    from .implementations.table import NAMED, PAGED
    from .latent_attention.arguments import LatentAttention
    from .latent_attention.triton import latent_attention_triton
    from .merge_states.arguments import MergeStates
    from .merge_states.triton import merge_states_triton
    from .paged_latent_attention.arguments import PagedLatentAttention
    from .paged_latent_attention.triton import is_for_a_page_size, paged_latent_attention_triton
    from .sparse_latent_attention.arguments import SparseLatentAttention
    from .sparse_latent_attention.triton import sparse_latent_attention_triton

    rows, pages = ("latent", "k_rope"), ("latent_pages", "rope_pages")
    return {
        torch.ops.mla.latent_attention.default: _Launcher(LatentAttention, rows, latent_attention_triton),
        torch.ops.mla.sparse_latent_attention.default: _Launcher(
            SparseLatentAttention, rows, sparse_latent_attention_triton, NAMED
        ),
        torch.ops.mla.paged_latent_attention.default: _Launcher(
            PagedLatentAttention, pages, paged_latent_attention_triton, PAGED, is_for_a_page_size
        ),
        torch.ops.mla.merge_states.default: _Launcher(MergeStates, (), lambda x, _: merge_states_triton(x)),
    }


def _is_ours(op: Any, x: Any, machine: Any, kernels: str, recorded: bool) -> bool:
    """Whether our own kernel computes an op for which other projects have kernels too.

    Where symbols leave the choice open until a call, it does if none of the others is installed.
    """
    from ..asked import OURS
    from .implementations.choose import any_installed, foreseen

    choice = foreseen(op, x, machine, kernels, recorded=recorded)
    if choice is None:
        return not any_installed(op, kernels, machine.arch, recorded)
    return choice.name == OURS


def _numbers(arguments: Sequence[Any]) -> Iterator[Any]:
    """Sizes and strides of tensors, and symbolic numbers among the arguments."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield from (*argument.shape, *argument.stride())
        elif isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
            yield argument


def _planned_by(q: Tensor, caches: Sequence[Tensor]) -> Iterator[Any]:
    """Numbers to which kernels are specialised, besides the size of a page: heads and widths."""
    yield from q.shape[2:]
    yield q.stride(-1)
    for rows in caches:
        yield from (rows.shape[-1], *rows.stride()[-2:])
