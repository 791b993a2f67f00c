"""Print a plan as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from ..text_table import aligned
from ..units import in_units
from .layouts import ELEMENT_SIZE, CacheDtype, Layout, layouts
from .sizes import ModelSizes


@dataclass(frozen=True)
class MemoryPlan:
    """What is to be cached, and the memory available for it."""

    model: ModelSizes
    context: int
    """Tokens of each sequence."""
    batch: int
    """Sequences."""
    dtype: CacheDtype
    kv_heads: int
    """Key and value heads of the GQA to compare with."""
    memory: int | None = None
    """Bytes available for caches, without weights and activations."""

    @property
    def sequences(self) -> str:
        """The batch in words."""
        return "1 sequence" if self.batch == 1 else f"{self.batch:,} sequences"

    @property
    def layouts(self) -> list[Layout]:
        return layouts(self.dtype, self.kv_heads)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each layout: bytes per token in a layer of the first kind and in all layers, bytes of the whole
        batch, the ratio to the latent layout, and the largest number of sequences that fit into the memory."""
        first = next(iter(self.model.layers))
        chosen = self.layouts
        latent = next(layout for layout in chosen if layout.name.startswith("latent"))
        return [
            {
                "layout": layout.name,
                "holds": layout.holds(first),
                "layer_bytes": layout.layer_bytes(first),
                "token_bytes": layout.token_bytes(self.model),
                "bytes": self.batch * layout.sequence_bytes(self.model, self.context),
                "times_latent": layout.token_bytes(self.model) / latent.token_bytes(self.model),
                "largest_batch": None
                if self.memory is None
                else self.memory // layout.sequence_bytes(self.model, self.context),
            }
            for layout in chosen
        ]


def as_json(plan: MemoryPlan) -> str:
    """The plan and its rows as JSON."""
    model = plan.model
    described = {
        "model_type": model.name,
        "layers": [{"count": count, **asdict(sizes)} for sizes, count in model.layers.items()],
    }
    asked = {key: getattr(plan, key) for key in ("context", "batch", "dtype", "kv_heads", "memory")}
    return json.dumps({"model": described, **asked, "rows": plan.rows()}, indent=1)


def as_text(plan: MemoryPlan) -> str:
    """The plan as a table, with notes on what its numbers count."""
    model = plan.model
    kinds = ", ".join(f"{count} layers of {sizes}" for sizes, count in model.layers.items())
    others = f"; {model.others} others keep none" if model.others else ""
    header = ["layout", "a token and layer", "bytes", "all layers", "in all", "x latent"]
    if plan.memory is not None:
        header.append(f"sequences in {in_units(plan.memory)}")
    cells = [header]
    for row in plan.rows():
        line = [row["layout"], row["holds"], f"{row['layer_bytes']:,}", f"{row['token_bytes']:,}"]
        line += [in_units(row["bytes"]), f"{row['times_latent']:.3g}"]
        cells.append(line + ([] if plan.memory is None else [f"{row['largest_batch']:,}"]))
    heading = [
        f"{model.name}: {kinds}{others}",
        f"{plan.sequences} of {plan.context:,} tokens, {plan.dtype}",
        "",
    ]
    return "\n".join([*heading, *aligned(cells, "<<>"), "", *_notes(plan)])


def _notes(plan: MemoryPlan) -> list[str]:
    """Notes for readers who compare these numbers with others."""
    model = plan.model
    first = next(iter(model.layers))
    rows = {row["layout"]: row for row in plan.rows()}
    mha, latent = rows["MHA"], rows.get("latent") or rows["latent FP8"]
    times, ranks = mha["times_latent"], 8
    lines = [
        f"MHA's {times:.0f}x: {first.N} heads of {first.V} for keys and for values, {mha['layer_bytes']:,} against "
        f"{latent['layer_bytes']:,} bytes"
        + (" in layers of the first kind, to which the columns up to `bytes` refer." if len(model.layers) > 1 else "."),
        f"The naive code's keys have their rope columns too, {first.P + first.R} in all: "
        f"{rows['expanded']['times_latent']:.0f}x.",
        f"Tensor parallelism divides heads, not the latent, which every rank holds: on {ranks} ranks, "
        f"{times:.0f}x becomes "
        f"{times / ranks:.1f}x.",
        "DeepSeek-V2's published 93.3 % less compares with another model (DeepSeek 67B: 95 layers, GQA of 8 heads) and "
        "counts 6 bits per element.",
    ]
    if model.indexers:
        width = model.index_width * ELEMENT_SIZE[plan.dtype]
        lines.append(
            f"Not counted in any layout: an indexer's keys, {width:,} bytes per token and layer "
            f"in {model.indexers} layers."
        )
    return lines
