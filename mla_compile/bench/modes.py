"""The ways to run the layer that are compared."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mla_compile.bench.layers import Built
from mla_compile.bench.peers import absorbed_by_hand
from mla_compile.bench.workloads import CacheKind, Workload, make_inputs

Step = Callable[[Mapping[str, Any]], Tensor]
"""Takes the attention's keyword arguments, updates their cache, and returns the output `[1, Sq, hidden]`."""


def _eager(built: Built) -> Step:
    return lambda arguments: built.attention(**arguments)[0]


def _by_hand(built: Built) -> Step:
    return lambda arguments: absorbed_by_hand(built.attention, arguments)


def _compiled(backend: str) -> Callable[[Built], Step]:
    def make(built: Built) -> Step:
        compiled = torch.compile(built.attention, backend=backend)
        return lambda arguments: compiled(**arguments)[0]

    return make


MODES: dict[str, Callable[[Built], Step]] = {
    "eager": _eager,
    "inductor": _compiled("inductor"),
    "by-hand": _by_hand,
    "mla": _compiled("mla"),
}
DESCRIPTIONS = {
    "eager": "transformers as it is",
    "inductor": "transformers under torch.compile",
    "by-hand": "absorbed by hand, eager",
    "mla": 'transformers under torch.compile(backend="mla")',
}


def summary(failure: Exception) -> str:
    """The type and first two lines of an error: torch names the failing backend, then the error in the second."""
    return " ".join([f"{type(failure).__name__}:", *str(failure).split("\n")[:2]]).strip(": ")


def warmed_up(mode: str, built: Built, workload: Workload, cache_kind: CacheKind) -> Step:
    """The step after warm-up, so that modes that compile are in the state that they have in the middle of a
    generation.

    With a dynamic cache, lengths change from call to call. So the first warm-up call is one token shorter: at the
    second call torch.compile then makes lengths symbolic, and that code is measured.
    """
    step = MODES[mode](built)
    if cache_kind == "dynamic" and workload.tokens > 1:
        step(make_inputs(built, Workload(workload.kind, workload.tokens - 1), cache_kind).arguments())
    step(make_inputs(built, workload, cache_kind).arguments())
    return step
