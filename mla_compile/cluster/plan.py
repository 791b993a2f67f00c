"""Rank the meshes of a cluster by step time, say why each is not the first, and compare numbers of devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..units import in_units
from .engines import TRANSFORMERS, Refusal, engines, refused
from .link import Link
from .mesh import Mesh, meshes
from .model import Model
from .step import Device, Step, Task


@dataclass(frozen=True)
class ClusterPlan:
    """A request: a model, what it decodes, and the available devices."""

    model: Model
    task: Task
    device: Device
    link: Link
    devices: int

    @cached_property
    def steps(self) -> list[Step]:
        """The steps on supported meshes that fit, the fastest first; ties are ordered by memory."""
        fitting = [step for step in self._taken if step.fits]
        return sorted(fitting, key=lambda step: (step.time, step.memory))

    @cached_property
    def too_large(self) -> list[Step]:
        """The steps on supported meshes that do not fit, the smallest first."""
        return sorted((step for step in self._taken if not step.fits), key=lambda step: step.memory)

    @cached_property
    def refused(self) -> dict[Mesh, Refusal]:
        """The meshes that no engine supports, and why."""
        asked = {mesh: refused(self.model, mesh, self.task.batch) for mesh in meshes(self.devices)}
        return {mesh: reason for mesh, reason in asked.items() if reason}

    @property
    def for_transformers(self) -> Step | None:
        """The fastest step on a mesh that transformers supports."""
        return next((step for step in self.steps if TRANSFORMERS in engines(self.model, step.mesh)), None)

    def why_not(self, step: Step) -> str:
        """Why a step is not the first, in words; empty for the first."""
        if not step.fits:
            parts = f"{in_units(int(step.weights))} of weights, {in_units(step.cache)} of latents"
            return f"takes {in_units(int(step.memory))} of {in_units(self.device.memory)}: {parts}"
        first = self.steps[0]
        if step.mesh == first.mesh:
            return ""
        more = {bound: seconds - first.seconds[bound] for bound, seconds in step.seconds.items()}
        worst = max(more, key=more.__getitem__)
        if more[worst] <= 0:
            more_memory = int(step.memory - first.memory)
            return f"as fast, {in_units(more_memory)} more memory" if more_memory else "as fast"
        return f"{worst} +{1000 * more[worst]:.3g} ms"

    def scaled(self) -> list[ClusterPlan]:
        """The same plan with fewer devices (powers of two), then with all."""
        counts = [2**i for i in range(self.devices.bit_length()) if 2**i < self.devices]
        return [replace(self, devices=count) for count in counts] + [self]

    @cached_property
    def _taken(self) -> list[Step]:
        return list(self._all_taken())

    def _all_taken(self) -> Iterator[Step]:
        for mesh in meshes(self.devices):
            if mesh not in self.refused:
                yield Step(self.model, self.task, self.device, self.link, mesh)


def where_it_pays(plans: list[ClusterPlan]) -> str:
    """Say with how many devices a token is cheapest and a step fastest; `plans` are in order of their devices."""
    found = [plan for plan in plans if plan.steps]
    if not found:
        return "The model fits on no number of devices up to this one."
    cheapest = min(found, key=lambda plan: plan.devices * plan.steps[0].time)
    fastest = min(found, key=lambda plan: plan.steps[0].time)
    several = "devices" if cheapest.devices > 1 else "device"
    words = f"A token is cheapest on {cheapest.devices:,} {several}: {_rate(cheapest)} a second on each."
    words += f" A step is fastest on {fastest.devices:,}: {1000 * fastest.steps[0].time:.3g} ms"
    words += f", {_rate(fastest)} tokens a second on each" if fastest is not cheapest else ""
    return words + ("." if fastest is found[-1] else "; more of them make it no faster.")


def _rate(plan: ClusterPlan) -> str:
    """Tokens per second and device."""
    return f"{plan.task.batch / plan.steps[0].time / plan.devices:,.1f}"
