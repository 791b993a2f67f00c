"""Time `generate` of a whole transformers model, for each way to compile it and each cache.

A workload begins with a cache that is empty or holds a number of tokens (random latents of unit variance, written by
the cache's own `update`). The steps of `generate` itself are timed, from one choice of a token to the next.
"""

import copy
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mla_compile.bench.check import HALF_FACTOR, distance, too_far
from mla_compile.bench.generation import engine
from mla_compile.bench.generation.caches import CACHES
from mla_compile.bench.generation.models import WholeModel
from mla_compile.bench.generation.ways import ENGINES, Batch, Result, Way
from mla_compile.bench.layers import Layer
from mla_compile.bench.measure import rewritten
from mla_compile.bench.memory import needed_bytes, too_much
from mla_compile.bench.modes import summary
from mla_compile.bench.progress import log
from mla_compile.bench.workloads import Workload
from mla_compile.cache.argument import cache_argument

SLOW_SECONDS = 120.0
"""A way that takes longer than this for one workload stops its timed steps early, but not before the second."""
EXACT_TOKENS = 1024
"""The number of prompt tokens that are read at a time in float64, as the scores of all tokens would not fit."""


@dataclass
class _Clock:
    """A stopping criterion of `generate` that records the times at which tokens were chosen."""

    most: int
    times: list[float] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        over = len(self.times) >= 3 and self.times[-1] - self.times[0] > SLOW_SECONDS
        done = over or len(self.times) >= self.most
        return torch.full((input_ids.shape[0],), done, device=input_ids.device)


@dataclass(frozen=True)
class _Run:
    """One call of `generate`."""

    logits: Tensor
    """The logits of the first step, `[B, vocabulary]`, float32."""
    first: float
    """Seconds to the first token."""
    steps: tuple[float, ...]
    """Seconds of each further token."""


def measure(
    model: nn.Module, whole: WholeModel, batches: Sequence[Batch], ways: Sequence[Way], repeats: int
) -> list[Result]:
    """A result for each way and workload. Ways run one after the other, so that code compiled for one workload is
    reused.

    Times exclude compilation, warm-up and the filling of caches. Every way begins with the same latents.
    """
    log(f"logits in float64 of {len(batches)} workloads")
    references = {batch: _reference(model, whole, batch) for batch in batches}
    results: list[Result] = []
    allowed: dict[tuple[str, Batch], float] = {}
    for way in ways:
        if way in ENGINES:
            results += _served(model, whole, batches, way, repeats)
            continue
        torch.compiler.reset()
        compiled: Any = copy.deepcopy(model, {id(tensor): tensor for tensor in _tensors(model)})
        if way.compiler != "eager":
            compiled.compile(backend=way.compiler)
        for batch in batches:
            log(f"{way}: {batch}")
            exact = references[batch]
            if isinstance(exact, str):
                results.append(Result(way, batch, "skipped", exact))
                continue
            key = way.cache, batch
            if key not in allowed:  # the error of unmodified transformers with the same cache, for one sequence
                plain = _generate(model, whole, Batch(1, batch.workload), way.cache, 1)
                allowed[key] = HALF_FACTOR * max(
                    distance(plain.logits, exact), torch.finfo(whole.layer.torch_dtype).eps
                )
            results.append(_measure(compiled, whole, batch, way, repeats, exact, allowed[key]))
    return results


def _served(model: nn.Module, whole: WholeModel, batches: Sequence[Batch], way: Way, repeats: int) -> list[Result]:
    """The results for vLLM, whose log-probabilities may have an error like that of transformers' own."""
    log(f"{way}: {', '.join(map(str, batches))}")
    check = Batch(1, Workload("prefill", engine.CHECK_TOKENS))
    exact = _reference(model, whole, check)
    if isinstance(exact, str):
        return [Result(way, batch, "skipped", exact) for batch in batches]
    exact = exact.log_softmax(-1)
    plain = _generate(model, whole, check, "dynamic", 1).logits.log_softmax(-1)
    allowed = HALF_FACTOR * max(distance(plain, exact), torch.finfo(whole.layer.torch_dtype).eps)
    return engine.measure(model, whole, batches, way, repeats, exact, allowed)


def _measure(
    model: nn.Module, whole: WholeModel, batch: Batch, way: Way, repeats: int, exact: Tensor, allowed: float
) -> Result:
    if reason := too_much(batch.size * needed_bytes(whole.layer, batch.workload, way.compiler)):
        return Result(way, batch, "skipped", reason)
    decodes = batch.workload.kind == "decode"
    try:
        _warm_up(model, whole, batch, way)
        note = rewritten() if way.compiler == "mla" else ""
        gc.collect()
        runs = [_generate(model, whole, batch, way.cache, 2 + repeats if decodes else 1)]
        error = distance(runs[0].logits, exact.expand(batch.size, -1))
        if error > allowed:
            return Result(way, batch, "wrong", too_far(error, allowed), (), error)
        while not decodes and len(runs) < repeats and sum(run.first for run in runs) < SLOW_SECONDS:
            runs.append(_generate(model, whole, batch, way.cache, 1))
    except Exception as failure:  # any error of a compiler is a result of the benchmark and must not end it
        return Result(way, batch, "failed", summary(failure))
    seconds = runs[0].steps[1:] if decodes else tuple(run.first for run in runs)
    return Result(way, batch, "ok", note, seconds, error)


def _warm_up(model: nn.Module, whole: WholeModel, batch: Batch, way: Way) -> None:
    """Compile what the timed calls run. Sizes that change from call to call become symbolic at the second call."""
    shorter = Batch(batch.size, Workload(batch.workload.kind, max(batch.workload.tokens - 1, 1)))
    _generate(model, whole, shorter, way.cache, 3 if batch.workload.kind == "decode" else 1)
    for _ in range(3):
        before = _graphs()
        _generate(model, whole, batch, way.cache, 3 if batch.workload.kind == "decode" else 1)
        if _graphs() == before:
            return


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _generate(
    model: Any, whole: WholeModel, batch: Batch, cache_kind: str, tokens: int, at_once: int | None = None
) -> _Run:
    """Generate `tokens` tokens, or fewer if that is slow, with a cache of the given kind.

    If the prompt is longer than `at_once`, all but its last `at_once` tokens are read in parts of that size, untimed.
    """
    workload, dtype = batch.workload, next(model.parameters()).dtype
    room = workload.keys + tokens
    cache = CACHES[cache_kind](model, batch.size, room)
    taken = {cache_argument(model.forward): cache}
    if workload.context:
        latent, rope = (part.expand(batch.size, -1, -1, -1).to(dtype) for part in _latents(whole.layer, workload))
        for i in range(whole.layers):
            cache.update(latent.clone(), rope.clone(), i)
    ids = engine.prompt(whole, workload.keys).expand(batch.size, -1)
    if at_once and workload.queries > at_once:
        for part in ids[:, workload.context : -at_once].split(at_once, dim=1):
            model(part, **taken, logits_to_keep=1)
    clock = _Clock(tokens)
    start = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **taken,
        max_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=[clock],
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=True,  # no compilation by transformers itself (static cache): the way says how to compile
    )
    steps = tuple(after - before for before, after in zip(clock.times, clock.times[1:], strict=False))
    return _Run(output.logits[0].float(), clock.times[0] - start, steps)


def _latents(layer: Layer, workload: Workload) -> tuple[Tensor, Tensor]:
    """Latents `[1, 1, T, L]` and rope keys `[1, 1, T, R]` of one sequence, in bfloat16, which each dtype represents."""
    generator = torch.Generator().manual_seed(1)
    shapes = (1, 1, workload.context, layer.L), (1, 1, workload.context, layer.R)
    latent, rope = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return latent, rope


def _reference(model: nn.Module, whole: WholeModel, batch: Batch) -> Tensor | str:
    """The first step's logits `[1, vocabulary]` of one sequence in float64, or why there are none."""
    weights = 8 * sum(weight.numel() for weight in model.parameters())
    doubled = replace(whole.layer, dtype="float64")
    if too_much(weights + needed_bytes(doubled, batch.workload, "eager", EXACT_TOKENS)):
        return "there is not enough memory to check the logits against float64"
    exact: Any = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the grouped product does not support float64
    return _generate(exact, whole, Batch(1, batch.workload), "dynamic", 1, EXACT_TOKENS).logits.double()


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
