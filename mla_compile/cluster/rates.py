"""Parse rates in command-line arguments: `3.35TB/s`, `989T`, `450GB/s,3us`."""

from __future__ import annotations

import argparse
import math
import re

from ..parsing import in_bytes
from .link import Link

FLOPS = {"g": 1e9, "t": 1e12, "p": 1e15}
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}


def bytes_per_second(text: str) -> float:
    """Parse `3.35TB/s`, `900 GiB/s`; a number without a unit is most likely one of TB."""
    try:
        return float(in_bytes(text.lower().removesuffix("/s") if "b" in text.lower() else ""))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected bytes a second, such as 3.35TB/s, found {text!r}") from None


def flops_per_second(text: str) -> float:
    """Parse `989T`, `1.98 PFLOP/s`."""
    return _number(text, FLOPS, r"\s*(?:flop/?s)?", "FLOP a second, such as 989T")


def link(text: str) -> Link:
    """Parse bandwidth and latency: `450GB/s,3us`."""
    bandwidth, comma, latency = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"expected bandwidth and latency, such as 450GB/s,3us, found {text!r}")
    return Link(bytes_per_second(bandwidth), _number(latency, SECONDS, "", "seconds, such as 3us"))


def _number(text: str, units: dict[str, float], rest: str, expected: str) -> float:
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(units)}){rest}", text.strip().lower())
    number = float(found[1]) * units[found[2]] if found else 0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
    return number
