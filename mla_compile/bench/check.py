"""Check the output of a mode: compare its distance from float64 with what rounding explains."""

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_compile.bench.layers import Built
from mla_compile.bench.memory import available_bytes, needed_bytes
from mla_compile.bench.modes import MODES, Step
from mla_compile.bench.workloads import CacheKind, Workload, make_inputs
from mla_compile.cache.argument import cache_of

ROUNDING_FACTOR = 4
"""The error of a sum of n terms exceeds this times `sqrt(n)` roundings with probability below `2 exp(-4^2 / 2)`, or
0.07 % (Higham & Mary, 2019, doi:10.1137/18M1226312, theorem 2.4). transformers' eager mode was seen to use a tenth."""
HALF_FACTOR = 3.0
"""How many times further from float64 a result may be than plain code in the same dtype, as in the tests. Another order
of the same sums gives 1 on average."""


@dataclass(frozen=True)
class Reference:
    """The result of the call in float64."""

    output: Tensor
    """`[1, Sq, hidden]`"""
    latent: Tensor
    """The cache's latents after the call, `[1, 1, T, L]`"""
    rope_key: Tensor
    """`[1, 1, T, R]`"""


def reference(built: Built, workload: Workload, cache_kind: CacheKind) -> Reference | None:
    """The float64 result of transformers' own module or, if that does not fit, absorbed by hand; else None."""
    weights = 8 * sum(weight.numel() for weight in built.attention.parameters())
    available, doubled = available_bytes(), replace(built.layer, dtype="float64")
    for mode in ("eager", "by-hand"):
        if available is None or weights + needed_bytes(doubled, workload, mode) < available:
            exact = replace(built, attention=copy.deepcopy(built.attention).double())
            return _run(MODES[mode](exact), built, workload, cache_kind, torch.float64)
    return None


def error(step: Step, built: Built, workload: Workload, cache_kind: CacheKind, exact: Reference) -> float:
    """The largest difference from float64 in output and cache, each relative to its largest element.

    Infinite if a shape differs or a value is NaN.
    """
    found = _run(step, built, workload, cache_kind, built.layer.torch_dtype)
    return max(
        distance(found.output, exact.output),
        distance(found.latent, exact.latent),
        distance(found.rope_key, exact.rope_key),
    )


def tolerance(built: Built, workload: Workload, cache_kind: CacheKind, exact: Reference) -> float:
    """The relative error that rounding explains: in fp32 `4 sqrt(n) 2^-24`, with n terms in the layer's longest sum.

    In half precision each stage of the layer rounds its result. There it is HALF_FACTOR times the error of unmodified
    transformers (if that does not fit, of the layer absorbed by hand), or of one eps if that is more.
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
    cached = cache_of(arguments).layers[0]
    return Reference(output, cached.keys, cached.values)


def too_far(error: float, allowed: float) -> str:
    """Why a result is wrong: its distance from float64, and the largest that rounding explains."""
    return f"is {error:.1e} away from float64, rounding explains at most {allowed:.1e}"


def distance(found: Tensor, exact: Tensor) -> float:
    """The largest difference relative to the largest element; infinite if shapes differ or a value is NaN."""
    if found.shape != exact.shape:
        return math.inf
    relative = ((found.double() - exact).abs().max() / exact.abs().max()).item()
    return math.inf if math.isnan(relative) else relative
