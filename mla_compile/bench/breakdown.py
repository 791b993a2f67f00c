"""Break down the time of the absorbed layer into its stages, each timed alone."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mla_compile.bench import peers
from mla_compile.bench.layers import Built
from mla_compile.bench.workloads import CacheKind, Workload, make_inputs
from mla_compile.cache.argument import cache_of


@dataclass(frozen=True)
class Breakdown:
    """The stages of the layer absorbed by hand in eager mode, in order."""

    workload: Workload
    stages: dict[str, float]
    """Median seconds of each stage alone; its data may be in another cache level than when the whole layer runs."""
    whole: float
    """Median seconds of the layer, measured in turn with the stages."""


def break_down(built: Built, workload: Workload, cache_kind: CacheKind, repeats: int) -> Breakdown:
    """Time the stages in turn, `repeats` times after one warm-up."""
    attention, inputs = built.attention, make_inputs(built, workload, cache_kind)
    q_nope, q_rope, new_latent, new_rope_key = peers.project(
        attention, inputs.hidden_states, inputs.position_embeddings
    )
    updated = inputs.fresh_cache().update(new_latent, new_rope_key, 0)
    latent, rope_key = (tensor.clone() for tensor in updated)  # a static cache will be written again
    q_latent = peers.absorb(attention, q_nope)
    o_latent = peers.attend(attention, q_latent, q_rope, latent, rope_key, inputs.attention_mask)
    heads = peers.expand_values(attention, o_latent)

    hidden_states, rope, mask = inputs.hidden_states, inputs.position_embeddings, inputs.attention_mask
    stages: dict[str, Callable[[dict[str, Any]], object]] = {
        "projections, norms, rope": lambda _: peers.project(attention, hidden_states, rope),
        "cache update": lambda arguments: cache_of(arguments).update(new_latent, new_rope_key, 0),
        "absorb W_UK": lambda _: peers.absorb(attention, q_nope),
        "attention": lambda _: peers.attend(attention, q_latent, q_rope, latent, rope_key, mask),
        "W_UV": lambda _: peers.expand_values(attention, o_latent),
        "output projection": lambda _: peers.output(attention, heads),
        "whole": lambda arguments: peers.absorbed_by_hand(attention, arguments),
    }
    seconds: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(1 + repeats):
        for name, stage in stages.items():
            arguments = inputs.arguments()
            start = time.perf_counter()
            stage(arguments)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    whole = medians.pop("whole")
    return Breakdown(workload, medians, whole)
