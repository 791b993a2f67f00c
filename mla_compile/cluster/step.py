"""Model the memory and time of a decode step on each device of a mesh, and what bounds the time.

Each part of a layer takes the larger of its bytes over the device's bytes/s and its FLOPs over FLOP/s. Parts, layers
and exchanges run one after the other. Tokens are spread evenly over experts, and each expert in use is read once. The
pipeline is full: there are as many micro-batches as stages, and each waits for the slowest stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..memory.layouts import ELEMENT_SIZE, CacheDtype, fp8_bytes
from .exchanges import exchanges
from .link import Link
from .mesh import Mesh
from .model import Layer, Model
from .stage import Stage, stages

WEIGHTS, CACHE, FLOPS, LINK = BOUNDS = "weights", "cache", "flops", "link"


@dataclass(frozen=True)
class Device:
    """One device of a cluster."""

    memory: int
    """Bytes for weights and caches."""
    bandwidth: float
    """Bytes/s through memory."""
    flops: float
    """FLOP/s of a matrix product."""


@dataclass(frozen=True)
class Task:
    """What is decoded."""

    batch: int
    """The number of sequences."""
    context: int
    """The number of tokens of each sequence."""
    dtype: CacheDtype = "bf16"
    """The dtype of the cache."""


@dataclass(frozen=True)
class Step:
    """One token for each sequence of a task, on a mesh."""

    model: Model
    task: Task
    device: Device
    link: Link
    mesh: Mesh

    @property
    def sequences(self) -> int:
        """The number of sequences that a group processes at a time."""
        return -(-self.task.batch // (self.mesh.dp * self.mesh.pp))

    @cached_property
    def weights(self) -> float:
        """Bytes of weights on the fullest device."""
        return max(map(self._weights, self._stages))

    @cached_property
    def cache(self) -> int:
        """Bytes of latents on the fullest device."""
        return max(map(self._cache, self._stages))

    @cached_property
    def memory(self) -> float:
        """Bytes of weights and latents on the fullest device."""
        return max(self._weights(stage) + self._cache(stage) for stage in self._stages)

    @property
    def fits(self) -> bool:
        return self.memory <= self.device.memory

    @cached_property
    def seconds(self) -> dict[str, float]:
        """The time of the step, split by what bounds it."""
        slowest = max(map(self._seconds, self._stages), key=lambda spent: sum(spent.values()))
        return {bound: self.mesh.pp * seconds for bound, seconds in slowest.items()}

    @property
    def time(self) -> float:
        """The seconds of the step."""
        return sum(self.seconds.values())

    @property
    def bound(self) -> str:
        """What bounds the largest part of the time."""
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def token_bytes(self) -> int:
        """Bytes per cached token in a layer."""
        s = self.model.sizes
        return fp8_bytes(s) if self.task.dtype == "fp8" else (s.L + s.R) * ELEMENT_SIZE[self.task.dtype]

    @property
    def tokens(self) -> int:
        """The largest number of tokens of a sequence on a device."""
        return -(-self.task.context // self.mesh.dcp)

    @cached_property
    def _stages(self) -> list[Stage]:
        """The distinct stages."""
        return list(dict.fromkeys(stages(self.model, self.mesh.pp)))

    def _weights(self, stage: Stage) -> float:
        """Bytes of a stage's weights on a device."""
        end = self.model.hidden * self.model.vocabulary / self.mesh.tp * 2
        held = sum(count * self._held(layer) for layer, count in stage.kinds)
        ends = stage.first + stage.last - (self.model.tied and stage.first and stage.last)
        return held * self.model.element_size + ends * end

    def _cache(self, stage: Stage) -> int:
        """Bytes of a stage's latents on a device."""
        sequences = -(-self.task.batch // self.mesh.dp)
        return sequences * self.tokens * self.token_bytes * stage.layers

    def _held(self, layer: Layer) -> float:
        """Weight elements of a layer on a device."""
        routed = layer.expert * self.model.experts / max(self.mesh.ep, self.mesh.tp)
        return layer.whole + layer.heads / self.mesh.tp + layer.dense / self._cut(layer) + routed

    def _cut(self, layer: Layer) -> int:
        """The number of ranks over which the MLP of every token is split. If several groups share experts, it is whole
        on each rank, and tokens are split instead."""
        return 1 if layer.expert and self.mesh.groups > 1 else self.mesh.tp

    def _seconds(self, stage: Stage) -> dict[str, float]:
        """The time of one micro-batch, split by what bounds it."""
        spent = dict.fromkeys(BOUNDS, 0.0)
        for bound, seconds in self._parts(stage):
            spent[bound] += seconds
        spent[LINK] = sum(map(self.link.seconds, exchanges(self.model, self.mesh, stage, self.sequences, self.link)))
        return spent

    def _parts(self, stage: Stage) -> Iterator[tuple[str, float]]:
        """For each part of the layers, and for the head: what bounds it, and its seconds in all layers."""
        s, mesh, model = self.model.sizes, self.mesh, self.model
        n = self.sequences
        for layer, count in stage.kinds:
            attention = layer.whole + layer.heads / mesh.tp
            yield self._of(WEIGHTS, attention * model.element_size, 2 * n * attention, count)
            scores = 2 * n * s.N / mesh.tp * self.task.context * (2 * s.L + s.R)
            yield self._of(CACHE, n * self.tokens * self.token_bytes, scores, count)
            dense = layer.dense / self._cut(layer)
            yield self._of(WEIGHTS, dense * model.element_size, 2 * n * layer.dense / mesh.tp, count)
            if layer.expert:
                together, ranks = n * mesh.groups, max(mesh.ep, mesh.tp)
                read = layer.expert * self._distinct(together) / ranks
                products = together * model.experts_of_token * layer.expert / ranks
                yield self._of(WEIGHTS, read * model.element_size, 2 * products, count)
        if stage.last:
            head = model.hidden * model.vocabulary / mesh.tp
            yield self._of(WEIGHTS, 2 * head, 2 * n * head, 1)

    def _distinct(self, tokens: int) -> float:
        """The expected number of experts in a layer that `tokens` use."""
        missed = (1 - self.model.experts_of_token / self.model.experts) ** tokens
        return self.model.experts * (1 - missed)

    def _of(self, what: str, size: float, flops: float, count: int) -> tuple[str, float]:
        moved, computed = size / self.device.bandwidth, flops / self.device.flops
        return (what, count * moved) if moved >= computed else (FLOPS, count * computed)
