"""What is compared: ways to run a model, at workloads."""

import statistics
from dataclasses import dataclass
from typing import Literal

from mla_compile.bench.generation.caches import CACHES
from mla_compile.bench.workloads import Workload


@dataclass(frozen=True)
class Way:
    """How a model is compiled, and what its latents are kept in."""

    compiler: Literal["eager", "inductor", "mla", "vllm", "vllm-mla"]
    """The last two are vLLM's engine, the last one with attention of ours."""
    cache: str

    def __str__(self) -> str:
        return f"{self.compiler}, {self.cache}"


@dataclass(frozen=True)
class Batch:
    """So many sequences of a workload, all alike."""

    size: int
    workload: Workload

    def __str__(self) -> str:
        return f"{self.workload}, batch {self.size}"


@dataclass(frozen=True)
class Result:
    """One way at one workload. No time without right logits."""

    way: Way
    batch: Batch
    status: Literal["ok", "wrong", "skipped", "failed"]
    note: str = ""
    """Why there is no time; for `mla` what became of the attentions."""
    seconds: tuple[float, ...] = ()
    """Wall time of each step, a prefill being one."""
    error: float | None = None
    """Largest distance of the first step's logits from float64, relative to the largest of these."""

    @property
    def tokens_per_second(self) -> float | None:
        """Of all sequences: written ones when decoding, read ones in a prefill."""
        if not self.seconds:
            return None
        return self.batch.size * self.batch.workload.queries / statistics.median(self.seconds)


WAYS = (
    Way("eager", "dynamic"),
    Way("inductor", "dynamic"),
    Way("inductor", "static"),
    *(Way("mla", cache) for cache in CACHES),
)
ENGINES = (Way("vllm", "pages"), Way("vllm-mla", "pages"))
"""vLLM with its own attention for CPUs, and with this package as its plugin."""
