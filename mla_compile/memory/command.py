"""`mla-compile memory MODEL_DIR_OR_CONFIG`: the memory that a model's cache takes, for each way to store it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..optional_packages import require
from ..parsing import figure, in_bytes, positive, tokens
from .layouts import CACHE_DTYPES
from .plot import plot
from .sizes import read_sizes
from .table import MemoryPlan, as_json, as_text


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "memory",
        help="show how much memory the cache of a model takes",
        description="Compute, from its config.json alone, how many bytes a model's cache takes: with expanded "
        "keys and values, as MHA and as GQA, as latents, and as FP8 latents.",
    )
    parser.add_argument("model", type=Path, help="a directory with a config.json, or the file itself")
    parser.add_argument(
        "--context", type=tokens, default=32768, help="tokens of each sequence, such as 4096 or 128k (default: 32k)"
    )
    parser.add_argument("--batch", type=positive, default=1, help="number of sequences (default: 1)")
    parser.add_argument("--dtype", choices=CACHE_DTYPES, default="bf16", help="dtype of the cache (default: bf16)")
    parser.add_argument(
        "--kv-heads", type=positive, default=8, help="key and value heads of the GQA to compare with (default: 8)"
    )
    parser.add_argument("--memory", type=in_bytes, metavar="SIZE", help="memory for the cache, such as 80GiB or 16GB")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--plot", type=figure, metavar="FILE", help="draw memory against context (png, svg, pdf)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, and plot it if requested."""
    if arguments.plot:
        require("matplotlib.figure", "plot", "--plot")
    model = read_sizes(arguments.model)
    plan = MemoryPlan(model, arguments.context, arguments.batch, arguments.dtype, arguments.kv_heads, arguments.memory)
    print(as_json(plan) if arguments.json else as_text(plan))
    if arguments.plot:
        plot(plan, arguments.plot)
    return 0
