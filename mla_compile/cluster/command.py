"""`mla-compile layout MODEL_DIR_OR_CONFIG`: how to split a model over devices."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..optional_packages import require
from ..parsing import figure, in_bytes, positive, tokens
from .model import read_model
from .plan import ClusterPlan
from .plot import plot
from .rates import bytes_per_second, flops_per_second, link
from .step import Device, Task
from .table import as_json, as_text


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "layout",
        help="show how to divide a model between devices",
        description="From a model's config.json and the rates of a device alone, list every way to divide the model "
        "between devices by tensor, decode context, data, expert and pipeline parallelism that vLLM or transformers "
        "supports: its memory, the predicted time of a decode step, what bounds that time, and the flags.",
    )
    parser.add_argument("model", type=Path, help="a directory with a config.json, or the file itself")
    parser.add_argument("--gpus", type=positive, required=True, help="number of devices")
    parser.add_argument(
        "--memory",
        type=in_bytes,
        required=True,
        metavar="SIZE",
        help="memory of each device for weights and latents, such as 72GiB",
    )
    parser.add_argument(
        "--bandwidth",
        type=bytes_per_second,
        required=True,
        metavar="RATE",
        help="bandwidth of that memory, such as 3.35TB/s",
    )
    parser.add_argument(
        "--flops",
        type=flops_per_second,
        required=True,
        metavar="RATE",
        help="FLOP/s of each device in matrix products, such as 989T",
    )
    parser.add_argument(
        "--link",
        type=link,
        required=True,
        metavar="RATE,LATENCY",
        help="bandwidth and latency of the slowest link between two devices, such as 450GB/s,3us",
    )
    parser.add_argument(
        "--context", type=tokens, default=32768, help="tokens of each sequence, such as 4096 or 128k (default: 32k)"
    )
    parser.add_argument("--batch", type=positive, default=1, help="number of sequences in all (default: 1)")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp8"), default="bf16", help="dtype of cached latents (default: bf16)"
    )
    parser.add_argument(
        "--weights",
        choices=("bf16", "fp8"),
        help="dtype of the layers' weights (default: what the config says, or bf16)",
    )
    parser.add_argument("--rows", type=positive, default=10, help="number of meshes to show (default: 10)")
    parser.add_argument("--json", action="store_true", help="print every mesh as JSON")
    parser.add_argument(
        "--plot",
        type=figure,
        metavar="FILE",
        help="draw the time of each mesh by what it is spent on, and against the number of devices (png, svg, pdf)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, and plot it if requested. The exit status is 1 if no mesh fits."""
    if arguments.plot:
        require("matplotlib.figure", "plot", "--plot")
    model = read_model(arguments.model, None if arguments.weights is None else arguments.weights == "fp8")
    task = Task(arguments.batch, arguments.context, arguments.dtype)
    device = Device(arguments.memory, arguments.bandwidth, arguments.flops)
    plan = ClusterPlan(model, task, device, arguments.link, arguments.gpus)
    print(as_json(plan) if arguments.json else as_text(plan, str(arguments.model), arguments.rows))
    if arguments.plot:
        plot(plan, arguments.plot, arguments.rows)
    return 0 if plan.steps else 1
