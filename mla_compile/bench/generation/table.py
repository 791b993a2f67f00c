"""Format the results as text, CSV and JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mla_compile.bench.generation.run import Generation
from mla_compile.bench.generation.ways import Result
from mla_compile.text_table import aligned, with_header

LEGEND = """\
tokens/s  written by all sequences of the batch, from the median step of generate; of a prefill those read
x limit   times the larger of FLOPs at the GEMM rate and bytes (weights and latents once) at the copy rate
speed-up  over stock Inductor with a DynamicCache
error     largest distance of the first step's logits from float64, relative to the largest
Ways run one after the other, not in turn: what else the machine does meets some of them."""


def rows(generation: Generation) -> list[dict[str, Any]]:
    """A flat row for each way at each workload, with None for what was not measured."""
    stock = {
        result.batch: result.tokens_per_second
        for result in generation.results
        if (result.way.compiler, result.way.cache) == ("inductor", "dynamic")
    }
    return [_row(generation, result, stock.get(result.batch)) for result in generation.results]


def _row(generation: Generation, result: Result, stock: float | None) -> dict[str, Any]:
    batch, rate = result.batch, result.tokens_per_second
    most = batch.size * batch.workload.queries / generation.limits[batch]
    return {
        "model": generation.whole.layer.name,
        "layers": generation.whole.layers,
        "dtype": generation.whole.layer.dtype,
        "workload": batch.workload.kind,
        "tokens": batch.workload.tokens,
        "batch": batch.size,
        "compiler": result.way.compiler,
        "cache": result.way.cache,
        "status": result.status,
        "tokens_per_second": rate,
        "limit_tokens_per_second": most,
        "times_limit": most / rate if rate else None,
        "speed_up": rate / stock if rate and stock else None,
        "error": result.error,
        "note": result.note,
    }


def as_csv(generation: Generation) -> str:
    """The rows as CSV, with a header."""
    return with_header(rows(generation))


def as_json(generation: Generation) -> str:
    """The machine, the model, the rows and every single time (in seconds) as JSON."""
    return json.dumps(
        {
            "device": asdict(generation.device),
            "load": generation.load,
            "model": asdict(generation.whole) | {"parameters": generation.parameters},
            "rows": [
                row | {"seconds": result.seconds}
                for row, result in zip(rows(generation), generation.results, strict=True)
            ],
        },
        indent=1,
    )


def as_text(generation: Generation) -> str:
    """A table for each workload."""
    whole, device, layer = generation.whole, generation.device, generation.whole.layer
    lines = [
        f"{device.name}: GEMM {device.flops_per_s / 1e9:.3g} GFLOP/s, copy {device.bytes_per_s / 1e9:.3g} GB/s, "
        f"{layer.dtype}; load average before the run {generation.load:.1f}",
        f"{layer.name} ({layer.model_type}), unmodified transformers: {whole.layers} layers, "
        f"{whole.experts} + {whole.shared_experts} experts, vocabulary {whole.vocabulary}, "
        f"{generation.parameters / 1e6:.0f}M random weights",
        LEGEND,
    ]
    table = rows(generation)
    for batch, seconds in generation.limits.items():
        of = batch.workload.kind, batch.workload.tokens, batch.size
        chosen = [row for row in table if (row["workload"], row["tokens"], row["batch"]) == of]
        most = batch.size * batch.workload.queries / seconds
        lines += ["", f"{batch}: limit {most:.4g} tokens/s", *_table(chosen)]
    return "\n".join(lines)


def _table(chosen: Sequence[dict[str, Any]]) -> list[str]:
    cells = [["compiler", "cache", "tokens/s", "x limit", "speed-up", "error", ""]]
    for row in chosen:
        way = [row["compiler"], row["cache"]]
        if row["tokens_per_second"] is None:
            cells.append([*way, "-", "-", "-", "-", f"{row['status']}: {row['note']}"])
            continue
        speed_up = "-" if row["speed_up"] is None else f"{row['speed_up']:.3g}"
        numbers = [f"{row['tokens_per_second']:.4g}", f"{row['times_limit']:.3g}", speed_up, f"{row['error']:.0e}"]
        cells.append([*way, *numbers, row["note"]])
    return aligned(cells, "<<>>>><")
