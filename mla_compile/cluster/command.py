"""`mla-compile layout MODEL_DIR_OR_CONFIG`: how to split a model over devices."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..optional_packages import require
from ..plan.command import in_bytes, positive, tokens
from .model import read_model
from .plan import Plan
from .plot import plot
from .rates import bytes_per_second, flops_per_second, link
from .step import Device, Task
from .table import as_json, as_text


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "layout",
        help="say how to share a model out over devices",
        description="Every way to share a model out over devices by tensor, decode context, data, expert and pipeline "
        "parallelism that vLLM or transformers takes: memory, predicted time of a decode step, what bounds it, and the "
        "flags. From its config.json and the rates of a device alone.",
    )
    parser.add_argument("model", type=Path, help="a directory with a config.json, or such a file")
    parser.add_argument("--gpus", type=positive, required=True, help="devices")
    parser.add_argument(
        "--memory", type=in_bytes, required=True, metavar="SIZE", help="of each, for weights and latents: 72GiB"
    )
    parser.add_argument(
        "--bandwidth", type=bytes_per_second, required=True, metavar="RATE", help="of its memory: 3.35TB/s"
    )
    parser.add_argument(
        "--flops", type=flops_per_second, required=True, metavar="RATE", help="of its matrix products: 989T"
    )
    parser.add_argument(
        "--link",
        type=link,
        required=True,
        metavar="RATE,LATENCY",
        help="between any two, the slowest that there is: 450GB/s,3us",
    )
    parser.add_argument("--context", type=tokens, default=32768, help="tokens of a sequence: 4096, 128k (default: 32k)")
    parser.add_argument("--batch", type=positive, default=1, help="sequences in all (default: 1)")
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16", help="of latents (default: bf16)")
    parser.add_argument("--weights", choices=("bf16", "fp8"), help="of layers (default: what the config says, or bf16)")
    parser.add_argument("--rows", type=positive, default=10, help="meshes to show (default: 10)")
    parser.add_argument("--json", action="store_true", help="print every mesh as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw time by its bounds and by the devices (png, svg, pdf)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, and plot it if requested. The exit status is 1 if no mesh fits."""
    if arguments.plot:
        require("matplotlib.figure", "plot", "--plot")
    model = read_model(arguments.model, None if arguments.weights is None else arguments.weights == "fp8")
    task = Task(arguments.batch, arguments.context, arguments.dtype)
    device = Device(arguments.memory, arguments.bandwidth, arguments.flops)
    plan = Plan(model, task, device, arguments.link, arguments.gpus)
    print(as_json(plan) if arguments.json else as_text(plan, str(arguments.model), arguments.rows))
    if arguments.plot:
        plot(plan, arguments.plot, arguments.rows)
    return 0 if plan.steps else 1
