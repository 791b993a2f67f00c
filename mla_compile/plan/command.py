"""`mla-compile memory MODEL_DIR_OR_CONFIG`: the memory that a model's cache takes, for each way to store it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from ..optional_packages import require
from .layouts import CACHE_DTYPES
from .plot import plot
from .sizes import read_sizes
from .table import Plan, as_json, as_text

TOKEN_UNITS = {"": 1, "k": 1024, "m": 1024**2}
BYTE_UNITS = {
    "": 1,
    **{f"{letter}ib": 1024 ** (i + 1) for i, letter in enumerate("kmgt")},
    **{f"{letter}b": 1000 ** (i + 1) for i, letter in enumerate("kmgt")},
}


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
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw memory against context (png, svg, pdf)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, and plot it if requested."""
    if arguments.plot:
        require("matplotlib.figure", "plot", "--plot")
    model = read_sizes(arguments.model)
    plan = Plan(model, arguments.context, arguments.batch, arguments.dtype, arguments.kv_heads, arguments.memory)
    print(as_json(plan) if arguments.json else as_text(plan))
    if arguments.plot:
        plot(plan, arguments.plot)
    return 0


def tokens(text: str) -> int:
    """Parse a number of tokens: `4096`, `128k` for 128 * 1024, `1m`."""
    return _number(text, TOKEN_UNITS, "tokens, such as 4096 or 128k")


def in_bytes(text: str) -> int:
    """Parse a number of bytes: `1000`, `80GiB` for 80 * 1024 ** 3, `80GB` for 80 * 1000 ** 3."""
    return _number(text, BYTE_UNITS, "bytes, such as 80GiB or 16GB")


def _number(text: str, units: dict[str, int], expected: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    number = float(found[1]) * units[found[2]] if found and found[2] in units else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of {expected}, found {text!r}")
    return int(number)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return int(text)
