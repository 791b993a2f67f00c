"""Launch small kernels of a decode step that do not depend on each other as one.

The norms of queries and latents, or the rotation of queries and a write to the cache, take less time than their
launches. Inductor can merge several kernels into one (`combo_kernels`), but only considers kernels at the same depth of
the dependency graph. Whether two match is chance: queries are rotated two products after keys. Here a kernel joins the
last earlier group of its kind on which it does not depend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch._inductor import config as inductor_config
from torch._inductor.scheduler import ForeachKernelSchedulerNode

config: Any = inductor_config  # a config module; its stubs lack `_config`

_FAR = 32
"""The largest distance, in scheduler nodes, between members of a group: more than a layer has. It bounds how much
longer buffers live."""
_MOST = 8
"""The largest number of kernels in a group."""
_MEMORY = ("combo_kernel_peak_memory_increase_gb", "combo_kernel_peak_memory_pct_threshold")
"""Settings for how much more memory combo kernels may take. While one of them is set, Inductor in torch 2.15 does not
ask for groups. Here `_FAR` bounds the memory instead."""
_BY_LEVELS = ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A context in which Inductor merges small kernels: by our groups, or its own if the user bounds their memory."""
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
    """The scheduler's nodes as groups, each of which becomes one kernel."""
    may = {node for group in _BY_LEVELS(scheduler) for node in ForeachKernelSchedulerNode.combinable_nodes(group)}
    kinds = {node: (node.get_device(), *_context(scheduler, node), node.is_reduction()) for node in may}
    places = {node: place for place, node in enumerate(scheduler.nodes)}
    waits = [[places[other] for other in scheduler._get_unmet_dep_nodes(node)] for node in scheduler.nodes]
    groups = joined(waits, [kinds.get(node) for node in scheduler.nodes])
    return [[scheduler.nodes[place] for place in group] for group in groups]


def _context(scheduler: Any, node: Any) -> tuple[Any, Any]:
    """The stream and the memory pool of a node, in torch versions that have them."""
    streams, pools = (getattr(scheduler, name, {}) for name in ("node_to_stream", "node_to_mempool"))
    return streams.get(node, 0), pools.get(node)


def joined(waits: list[list[int]], kinds: list[Any]) -> list[list[int]]:
    """Partition nodes `0` to `n - 1` into groups.

    All nodes of a group have the same kind, and none depends on another, even once each group is merged into one node.

    Args: waits, for each node the nodes on which it depends, all before it; kinds, None for nodes that stay alone.
    """
    groups: list[list[int]] = []
    of = list[int]()
    """The group of each node."""
    before = list[int]()
    """For each group, the groups on which it depends, as a bit mask."""
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
    """The last group of the node's kind, near enough and not full, on which the node does not depend."""
    for group in range(len(groups) - 1, -1, -1):
        members = groups[group]
        near = node - members[0] <= _FAR
        if near and kinds[members[0]] == kinds[node] and len(members) < _MOST and not own >> group & 1:
            return group
    return None
