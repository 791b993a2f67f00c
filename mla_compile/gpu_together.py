"""Small kernels of a decode step that do not wait for each other, as one launch.

A norm of queries and one of latents, or the rotation of queries and a write into the cache, take less time than their
launches. Inductor can make one kernel of several (`combo_kernels`), and looks for them among those that wait for
equally many others, one after the other. Which that are is chance: queries are rotated two products after keys. Here
a kernel joins the last of its kind before it that it does not wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch._inductor import config as inductor_config
from torch._inductor.scheduler import ForeachKernelSchedulerNode

config: Any = inductor_config  # a config module, whose `_config` is not in its stubs

_FAR = 32
"""Kernels and products between two that are launched together, at most: a layer has fewer. Buffers live no longer."""
_MOST = 8
"""Kernels that become one."""
_MEMORY = ("combo_kernel_peak_memory_increase_gb", "combo_kernel_peak_memory_pct_threshold")
"""How much more memory these kernels may take. In torch 2.15 Inductor asks for no groups while one of them is set. Here
`_FAR` bounds it."""
_BY_LEVELS = ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Compile a graph of small kernels in this context. Inductor groups them itself if the user has bounded memory."""
    memory = _MEMORY if hasattr(config, "combo_kernel_max_distance") else ()
    if any(getattr(config, name) != config._config[name].default for name in memory):
        with config.patch(combo_kernels=True):
            yield
        return
    with (
        config.patch({"combo_kernels": True} | dict.fromkeys(memory)),
        mock.patch.object(ForeachKernelSchedulerNode, "group_algorithm_for_combo_kernels", _groups),
    ):
        yield


def _groups(scheduler: Any) -> list[list[Any]]:
    """The scheduler's nodes, those that are to become one kernel in a list."""
    may = {node for group in _BY_LEVELS(scheduler) for node in ForeachKernelSchedulerNode.combinable_nodes(group)}
    kinds = {node: (node.get_device(), *_context(scheduler, node), node.is_reduction()) for node in may}
    places = {node: place for place, node in enumerate(scheduler.nodes)}
    waits = [[places[other] for other in scheduler._get_unmet_dep_nodes(node)] for node in scheduler.nodes]
    groups = joined(waits, [kinds.get(node) for node in scheduler.nodes])
    return [[scheduler.nodes[place] for place in group] for group in groups]


def _context(scheduler: Any, node: Any) -> tuple[Any, Any]:
    """The stream and the memory pool of a node, where torch knows of them."""
    streams, pools = (getattr(scheduler, name, {}) for name in ("node_to_stream", "node_to_mempool"))
    return streams.get(node, 0), pools.get(node)


def joined(waits: list[list[int]], kinds: list[Any]) -> list[list[int]]:
    """Nodes `0` to `n - 1` in groups.

    Nodes of a group are of a kind, not None, and no node of one waits for another, even if each group is one node.

    Args: the nodes that each one waits for, all before it; kinds, None of those that stay alone.
    """
    groups: list[list[int]] = []
    of = list[int]()
    """The group of each node."""
    before = list[int]()
    """The groups that each group waits for, as bits."""
    for node, kind in enumerate(kinds):
        own = 0
        for other in waits[node]:
            own |= before[of[other]] | 1 << of[other]
        group = _group_for(node, groups, kinds, own) if kind is not None else None
        if group is None:
            group = len(groups)
            groups.append([])
            before.append(0)
        groups[group].append(node)
        of.append(group)
        before[group] |= own
        for i, known in enumerate(before):
            if known >> group & 1:
                before[i] = known | before[group]
    return groups


def _group_for(node: int, groups: list[list[int]], kinds: list[Any], own: int) -> int | None:
    """The last group of the node's kind that is not among those that it waits for."""
    for group in range(len(groups) - 1, -1, -1):
        members = groups[group]
        near = node - members[0] <= _FAR
        if near and kinds[members[0]] == kinds[node] and len(members) < _MOST and not own >> group & 1:
            return group
    return None
