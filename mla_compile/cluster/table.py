"""Print the plan of a cluster as text and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from ..text_table import aligned
from ..units import in_units
from .engines import engines, transformers, vllm
from .plan import ClusterPlan, where_it_pays
from .step import Step

MOST_NAMED = 8
"""The largest number of sizes that are listed per reason for a refusal."""
MESH = ("tp", "dcp", "dp", "ep", "pp")


def as_json(plan: ClusterPlan) -> str:
    """Everything as JSON: each mesh with its memory and time, or why it is refused."""
    return json.dumps(
        {
            "model": {"model_type": plan.model.caches.name, "weights": plan.model.elements, "fp8": plan.model.fp8},
            "devices": plan.devices,
            **{key: asdict(getattr(plan, key)) for key in ("task", "device", "link")},
            "meshes": [row(plan, step) for step in [*plan.steps, *plan.too_large]],
            "refused": [{**asdict(mesh), "why_not": str(reason)} for mesh, reason in plan.refused.items()],
            "scaled": [
                {"devices": fewer.devices, **(row(fewer, fewer.steps[0]) if fewer.steps else {})}
                for fewer in plan.scaled()
            ],
        },
        indent=1,
    )


def row(plan: ClusterPlan, step: Step) -> dict[str, Any]:
    """A mesh: bytes on the fullest device, seconds of a step, what bounds these, and why it is not the first."""
    return {
        **asdict(step.mesh),
        "weights": step.weights,
        "cache": step.cache,
        "memory": step.memory,
        "sequence": step.tokens * step.token_bytes * len(plan.model.layers),
        "fits": step.fits,
        "seconds": step.time,
        "seconds_by": step.seconds,
        "tokens_per_second": plan.task.batch / step.time,
        "bound": step.bound,
        "engines": engines(plan.model, step.mesh),
        "why_not": plan.why_not(step),
    }


def as_text(plan: ClusterPlan, name: str, rows: int) -> str:
    """A table of the first `rows` meshes, the commands for the first, and a table for fewer devices."""
    parts = [_heading(plan), _meshes(plan, rows), _others(plan, rows)]
    if plan.steps:
        parts.append(_commands(plan, name))
    parts += ["\n".join(_scaled(plan)), where_it_pays(plan.scaled())]
    return "\n\n".join(part for part in parts if part)


def _heading(plan: ClusterPlan) -> str:
    model, device, task, link = plan.model, plan.device, plan.task, plan.link
    experts = f", {model.experts_of_token} of {model.experts} experts" if model.experts else ""
    return (
        f"{model.caches.name}: {model.elements / 1e9:.4g} billion weights in {'FP8' if model.fp8 else 'bfloat16'}, "
        f"{len(model.layers)} layers of {model.sizes}{experts}\n"
        f"{task.batch:,} sequence{'s' if task.batch > 1 else ''} of {task.context:,} tokens, {task.dtype}; "
        f"{plan.devices:,} devices of {in_units(device.memory)}, {device.bandwidth / 1e12:.3g} TB/s, "
        f"{device.flops / 1e12:.4g} TFLOP/s; link {link.bandwidth / 1e9:.3g} GB/s, {1e6 * link.latency:.3g} us"
    )


def _meshes(plan: ClusterPlan, rows: int) -> str:
    if not plan.steps and not plan.too_large:
        return "Neither engine supports any mesh of that many devices."
    header = [name.upper() for name in MESH]
    header += ["weights", "latents", "a sequence", "ms", "tokens/s", "bound", "engines", "why not"]
    cells = [header]
    for step in (plan.steps or plan.too_large)[:rows]:
        found = row(plan, step)
        line = [str(found[name]) for name in MESH]
        line += [in_units(int(found["weights"])), in_units(found["cache"]), in_units(found["sequence"])]
        line += [f"{1000 * found['seconds']:.3g}", f"{found['tokens_per_second']:,.0f}", found["bound"]]
        cells.append([*line, ", ".join(found["engines"]), found["why_not"]])
    return "\n".join(aligned(cells, ">" * 10 + "<"))


def _others(plan: ClusterPlan, rows: int) -> str:
    """How many meshes are not in the table, and why."""
    lines = []
    if len(plan.steps) > rows:
        lines.append(f"{len(plan.steps) - rows:,} more are slower.")
    if plan.too_large and plan.steps:
        least = plan.too_large[0]
        lines.append(f"{len(plan.too_large):,} do not fit, of which {least.mesh} {plan.why_not(least)}.")
    sizes: dict[tuple[str, str], Counter[int]] = {}
    for reason in plan.refused.values():
        sizes.setdefault((reason.what, reason.why), Counter())[reason.size] += 1
    for (what, why), counts in sizes.items():
        named = ", ".join(f"{size:,}" for size in sorted(counts)[:MOST_NAMED])
        more = ", ..." if len(counts) > MOST_NAMED else ""
        lines.append(f"{counts.total():,} refused: {what} {why} ({what} {named}{more}).")
    return "\n".join(lines)


def _commands(plan: ClusterPlan, name: str) -> str:
    first, ours = plan.steps[0], plan.for_transformers
    many = first.mesh.engines
    each = f" on each of {many:,} engines" if many > 1 else ""
    lines = [f"vLLM{each}, {first.mesh}:", "", vllm(first, name)]
    if ours is not None:
        each = f" in each of {ours.mesh.engines:,} groups of processes" if ours.mesh.engines > 1 else ""
        lines += ["", f"transformers{each}, {ours.mesh}, {1000 * ours.time:.3g} ms:", "", transformers(ours, name)]
    else:
        lines += ["", "transformers: no mesh that it supports fits."]
    return "\n".join(lines)


def _scaled(plan: ClusterPlan) -> list[str]:
    cells = [["devices", "mesh", "ms", "tokens/s", "on each", "bound"]]
    for fewer in plan.scaled():
        if not fewer.steps:
            why = "does not fit" if fewer.too_large else "refused"
            cells.append([f"{fewer.devices:,}", why, "", "", "", ""])
            continue
        step = fewer.steps[0]
        rate = fewer.task.batch / step.time
        line = [f"{fewer.devices:,}", str(step.mesh), f"{1000 * step.time:.3g}", f"{rate:,.0f}"]
        cells.append([*line, f"{rate / fewer.devices:,.1f}", step.bound])
    return aligned(cells, "><>>><")
