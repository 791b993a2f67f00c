"""Is the output of a mode right: its distance from float64, against what rounding explains."""

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_compile.bench.layers import Built
from mla_compile.bench.memory import available_bytes, needed_bytes
from mla_compile.bench.modes import MODES, Step
from mla_compile.bench.workloads import CacheKind, Workload, make_inputs

ROUNDING_FACTOR = 4
"""A sum of n terms is off by more than this times `sqrt(n)` roundings with probability below `2 exp(-4^2 / 2)`, 0.07 %
(Higham & Mary, 2019, doi:10.1137/18M1226312, theorem 2.4). Transformers' eager mode was seen to use a tenth of it."""
HALF_FACTOR = 3.0
"""As in the tests: another order of the same sums gives 1 on average."""


@dataclass(frozen=True)
class Reference:
    """What the call gives in float64."""

    output: Tensor
    """`[1, Sq, hidden]`"""
    latent: Tensor
    """The cache's latents after the call, `[1, 1, T, L]`"""
    rope_key: Tensor
    """`[1, 1, T, R]`"""


def reference(built: Built, workload: Workload, cache_kind: CacheKind) -> Reference | None:
    """transformers' own module in float64; where that does not fit, absorbed by hand in float64; else None."""
    weights = 8 * sum(weight.numel() for weight in built.attention.parameters())
    available, doubled = available_bytes(), replace(built.layer, dtype="float64")
    for mode in ("eager", "by-hand"):
        if available is None or weights + needed_bytes(doubled, workload, mode) < available:
            exact = replace(built, attention=copy.deepcopy(built.attention).double())
            return _run(MODES[mode](exact), built, workload, cache_kind, torch.float64)
    return None


def error(step: Step, built: Built, workload: Workload, cache_kind: CacheKind, exact: Reference) -> float:
    """Largest difference from float64 in output and cache, each relative to the largest element there.

    Infinite where a shape differs or a value is not a number.
    """
    found = _run(step, built, workload, cache_kind, built.layer.torch_dtype)
    return max(
        distance(found.output, exact.output),
        distance(found.latent, exact.latent),
        distance(found.rope_key, exact.rope_key),
    )


def tolerance(built: Built, workload: Workload, cache_kind: CacheKind, exact: Reference) -> float:
    """Relative error that rounding explains: in fp32 `4 sqrt(n) 2^-24`, n the terms of the longest sum in the layer.

    In half precision each stage of the layer rounds what it gives, and transformers as it is says how far that goes, or
    absorbed by hand where that does not fit: HALF_FACTOR times its own distance, or an eps if that is more.
    """
    layer = built.layer
    if layer.torch_dtype.itemsize < 4:
        available = available_bytes()
        fits = available is None or needed_bytes(layer, workload, "eager") < available
        plain = error(MODES["eager" if fits else "by-hand"](built), built, workload, cache_kind, exact)
        return HALF_FACTOR * max(plain, torch.finfo(layer.torch_dtype).eps)
    terms = max(layer.hidden, layer.N * layer.V, layer.L, workload.keys)
    return ROUNDING_FACTOR * math.sqrt(terms) * 2.0**-24


def _run(step: Step, built: Built, workload: Workload, cache_kind: CacheKind, dtype: torch.dtype) -> Reference:
    arguments = make_inputs(built, workload, cache_kind, dtype).arguments()
    output = step(arguments)
    cached = arguments["past_key_values"].layers[0]
    return Reference(output, cached.keys, cached.values)


def distance(found: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest element; infinite for another shape and for what is no number."""
    if found.shape != exact.shape:
        return math.inf
    relative = ((found.double() - exact).abs().max() / exact.abs().max()).item()
    return math.inf if math.isnan(relative) else relative
