"""Which flags each run of `bench` reads, and what they are where they are not given.

The parser has no defaults, so that a flag which a run does not read is an error before anything is measured.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_compile.bench.generation.caches import CACHES
from mla_compile.bench.modes import MODES

KINDS = ("decode", "sparse", "prefill", "train")
PEERS = ("mla", "mla-default", "sdpa", "flex", "inductor", "by-hand", "flashmla", "flashinfer", "vllm", "sglang")


@dataclass(frozen=True)
class Run:
    """One thing that `bench` measures."""

    asked_by: str
    """The flags that ask for it."""
    reads: Mapping[str, Any]
    """The flags that it reads, each with what it is where it is not given."""

    def of(self, arguments: Namespace) -> Namespace:
        """The flags of this run and the parser; the parser's error if another flag is given."""
        given = {name: value for name, value in vars(arguments).items() if name in FLAGS and value is not None}
        others = [name for name in given if name not in self.reads]
        if others:
            arguments.parser.error(
                f"{self.asked_by}: expected only flags that are read there ({_spelled(self.reads)}), "
                f"found {_spelled(others)}"
            )
        return Namespace(**{**self.reads, **given}, parser=arguments.parser)


def _spelled(names: Mapping[str, Any] | list[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


_ANY = {"device": "cpu", "json": None}
_DRAWN = {"csv": None, "plot": None}
_ON_CPU = {"dtype": "float32", "repeats": 10, "threads": None}

LAYER = Run(
    "a layer on the CPU",
    {
        **_ANY,
        **_DRAWN,
        **_ON_CPU,
        "layer": "v2-lite",
        "contexts": (1024, 4096, 16384, 32768),
        "prefill": (1024, 4096),
        "modes": tuple(MODES),
        "cache": "dynamic",
    },
)
TRAINING = Run("--train", {**_ANY, **_ON_CPU, "train": None, "layer": "v2-lite"})
GENERATION = Run(
    "--model",
    {
        **_ANY,
        **_DRAWN,
        **_ON_CPU,
        "model": None,
        "layers": 4,
        "caches": tuple(CACHES),
        "vllm": False,
        "contexts": (4096, 16384, 32768),
        "prefill": (1024, 8192),
        "batches": (1,),
        "modes": tuple(MODES),
    },
)
QUICK_KERNELS = Run(
    "--device cuda --quick",
    {
        **_ANY,
        **_DRAWN,
        "quick": False,
        "kernels": KINDS,
        "heads": (16, 128),
        "queries": (1, 2, 4),
        "dtypes": ("bf16", "fp8"),
        "peers": PEERS,
        "workspace_tokens": 1024,
        "max_autotune": False,
    },
)
KERNELS = Run(
    "--device cuda",
    {
        **QUICK_KERNELS.reads,
        "batches": (1, 16, 64, 256),
        "contexts": (1024, 8192, 32768, 131072),
        "prefill": (1024, 4096, 16384),
    },
)
RUNS = (LAYER, TRAINING, GENERATION, QUICK_KERNELS, KERNELS)
FLAGS = frozenset(name for run in RUNS for name in run.reads)
