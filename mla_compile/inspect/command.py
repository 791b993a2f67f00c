"""`mla-compile inspect MODEL_DIR --out DIR`: write the graphs, code and a page about a checkpoint's compilation."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from .. import device as devices
from ..optional_packages import require
from ..options import Options
from ..parsing import folder, positive
from ..sample_run import load


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "inspect",
        help="write graphs, generated code and a page that shows each attention before and after",
        description="Load a causal language model with transformers, compile it, run a prompt and one further token, "
        "and write what happened into a folder: open its index.html.",
    )
    parser.add_argument("model", help="a model directory or name that AutoModelForCausalLM can load")
    parser.add_argument("--out", type=folder, required=True, metavar="DIR", help="the folder to write")
    parser.add_argument("--tokens", type=positive, default=128, help="tokens of the prompt (default: 128)")
    parser.add_argument("--depyf", action="store_true", help="let depyf write its own dumps too, into DIR/depyf")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the folder, and print the report. The exit status is 1 if an attention stays unchanged."""
    from .folder import write
    from .page import Inspection

    with _depyf(arguments.out / "depyf") if arguments.depyf else contextlib.nullcontext():
        model, found = _compile(arguments.model, arguments.tokens)
    rates = devices.measured(model.device, model.dtype)
    name = Path(arguments.model).resolve().name if Path(arguments.model).exists() else arguments.model
    inspection = Inspection(name, found, rates, Options().workspace_tokens)
    paths = write(inspection, arguments.out)
    report = inspection.report
    print(report)
    print(f"\n{len(paths)} files; open {paths[0]}")
    return 0 if report.sites and report.rewritten == len(report.sites) else 1


def _compile(name: str, tokens: int) -> tuple[Any, list[Any]]:
    """The model, and the compilations of a prefill of `tokens` random tokens and of the following decode step."""
    from .collect import compilations

    sample = load(name, tokens, "inspect")
    steps = {f"Prefill of {tokens} tokens": sample.prefill, f"Decode after {tokens} tokens": sample.decode}
    with sample.compiling():
        found = [c for step, ids in steps.items() for c in compilations(sample.model, step, ids, **sample.arguments)]
    return sample.model, found


def _depyf(into: Path) -> Any:
    require("depyf", "inspect", "--depyf")
    import depyf

    return depyf.prepare_debug(str(into))
