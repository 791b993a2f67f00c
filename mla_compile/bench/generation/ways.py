"""The ways to run a model that are compared, and the workloads."""

import statistics
from dataclasses import dataclass
from typing import Literal

from mla_compile.bench.generation.caches import CACHES
from mla_compile.bench.workloads import Workload


@dataclass(frozen=True)
class Way:
    """How a model is compiled, and the kind of cache."""

    compiler: Literal["eager", "inductor", "mla", "vllm", "vllm-mla"]
    """The last two are vLLM's engine, with its own attention and with ours."""
    cache: str

    def __str__(self) -> str:
        return f"{self.compiler}, {self.cache}"


@dataclass(frozen=True)
class Batch:
    """A number of sequences with the same workload."""

    size: int
    workload: Workload

    def __str__(self) -> str:
        return f"{self.workload}, batch {self.size}"


@dataclass(frozen=True)
class Result:
    """One way at one workload. It has times only if the logits are right."""

    way: Way
    batch: Batch
    status: Literal["ok", "wrong", "skipped", "failed"]
    note: str = ""
    """Why there is no time; for `mla`, what became of the attentions."""
    seconds: tuple[float, ...] = ()
    """The wall time of each step; a prefill is one step."""
    error: float | None = None
    """The largest distance of the first step's logits from float64, relative to the largest float64 logit."""

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all sequences: generated ones for decode, prompt tokens for prefill."""
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
