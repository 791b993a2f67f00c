"""FLOPs and bytes of each path of an MLA site, where they cross, and which one a device should take.

Words and shapes are those of `ops`. Only what differs between the paths is counted: absorb or expand products, scores
and values. Projections, rope, norms and the cache write are the same for all of them.

A FLOP is half a multiply-add. A byte is counted once for each time the path cannot avoid moving it through memory:
weights, latent cache, query, output, and the path's own workspace once written and once read. Scores are not counted;
no path here has to store them.

Masks: with `causal`, only the query-key pairs that a causal mask leaves are counted, `Sq T - Sq (Sq - 1) / 2`.
`crossover_queries` and `choose` count all pairs, because most CPU attention computes them all and because it hardly
moves the decision: for DeepSeek-V3's dims and a context of 1000 the crossover goes from 148.6 to 158.1 queries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import Literal, TypeAlias

import sympy
from sympy.core.relational import Relational

Size: TypeAlias = int | sympy.Expr
Path: TypeAlias = Literal["absorbed", "chunked", "sparse"]
Times: TypeAlias = tuple[sympy.Expr, sympy.Expr]
"""Seconds for the FLOPs and seconds for the bytes, exact."""

QUERIES = sympy.Symbol("Sq", positive=True)
"""The unknown of `crossover_queries`; its `T` may be written in terms of it."""


@dataclass(frozen=True)
class Dims:
    """Sizes of one MLA site; each a positive integer or a sympy expression that stands for one."""

    B: Size
    """Sequences."""
    Sq: Size
    """Query tokens of each sequence."""
    T: Size
    """Key tokens of each sequence, context and now."""
    N: Size
    """Query heads."""
    L: Size
    """Width of the latent (`kv_lora_rank`)."""
    P: Size
    """Width of the part of a head's query and key without rope (`qk_nope_head_dim`)."""
    R: Size
    """Width of the rope key (`qk_rope_head_dim`)."""
    V: Size
    """Width of a head's value (`v_head_dim`)."""


@dataclass(frozen=True)
class Cost:
    """Work of one path at one site."""

    flops: sympy.Expr
    """Floating-point operations, two for each multiply-add of a matrix product."""
    bytes: sympy.Expr
    """Bytes through memory."""


@dataclass(frozen=True)
class Device:
    """Peak rates of a device for one dtype; see `mla_compile.device.measured`."""

    name: str
    flops_per_s: float
    """FLOP/s of a large matrix product."""
    bytes_per_s: float
    """Bytes/s, reads and writes together, of a large copy."""

    def __post_init__(self) -> None:
        for field in ("flops_per_s", "bytes_per_s"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ValueError(
                    f"Device {self.name!r}: {field} must be positive and finite, got {getattr(self, field)}"
                )


@dataclass(frozen=True)
class Decision:
    """The path a site should take, and for which other sizes that holds."""

    path: Path
    conditions: tuple[Relational, ...]
    """Inequalities `a >= b` or `a <= b` between polynomials with integer coefficients in the symbols of the dims.
    Wherever all of them hold, the path is the roofline's choice. Empty: it always is."""


def _pairs(dims: Dims, causal: bool) -> sympy.Expr:
    """Query-key pairs of one head of one sequence; causal queries are the last `Sq` of the `T` tokens."""
    dense = sympy.sympify(dims.Sq * dims.T)
    return dense - sympy.Rational(1, 2) * dims.Sq * (dims.Sq - 1) if causal else dense


def absorbed(dims: Dims, element_size: int, *, causal: bool = False) -> Cost:
    """Cost of attending in latent space; `element_size` is the bytes of one element.

    Workspace: the absorbed query and the output in latent space, `[B, Sq, N, L]` each.
    """
    d = dims
    multiply_adds = d.B * d.N * (d.Sq * d.L * (d.P + d.V) + _pairs(d, causal) * (2 * d.L + d.R))
    weights = d.N * d.L * (d.P + d.V)
    latent_cache = d.B * d.T * (d.L + d.R)
    query_and_output = d.B * d.Sq * d.N * (d.P + d.R + d.V)
    workspace = 2 * 2 * d.B * d.Sq * d.N * d.L
    return _cost(multiply_adds, weights + latent_cache + query_and_output + workspace, element_size)


def sparse(dims: Dims, element_size: int, topk: Size) -> Cost:
    """Cost of attending in latent space to the `topk` keys that each query names.

    Every query gathers its own keys, so that several queries read one key several times. An index takes 8 bytes.
    Workspace: as for absorbed.
    """
    d = dims
    multiply_adds = d.B * d.N * d.Sq * (d.L * (d.P + d.V) + topk * (2 * d.L + d.R))
    weights = d.N * d.L * (d.P + d.V)
    gathered = d.B * d.Sq * topk * (d.L + d.R)
    query_and_output = d.B * d.Sq * d.N * (d.P + d.R + d.V)
    workspace = 2 * 2 * d.B * d.Sq * d.N * d.L
    cost = _cost(multiply_adds, weights + gathered + query_and_output + workspace, element_size)
    return Cost(cost.flops, cost.bytes + 8 * d.B * d.Sq * topk)


def expanded(dims: Dims, element_size: int, *, causal: bool = False) -> Cost:
    """Cost of the naive code, which stores the keys `[B, N, T, P + R]` and values `[B, N, T, V]` of the whole cache."""
    d = dims
    weights = d.N * d.L * (d.P + d.V)
    latent_cache = d.B * d.T * (d.L + d.R)
    query_and_output = d.B * d.Sq * d.N * (d.P + d.R + d.V)
    keys_and_values = 2 * d.B * d.T * d.N * (d.P + d.R + d.V)
    return _cost(
        _expanded_multiply_adds(d, causal), weights + latent_cache + query_and_output + keys_and_values, element_size
    )


def chunked(dims: Dims, element_size: int, workspace_tokens: int, *, causal: bool = False) -> Cost:
    """Cost of expanding `workspace_tokens` tokens at a time, attending to them and merging the results.

    The multiply-adds are the naive code's. Each token's `[N, P]` keys and `[N, V]` values pass through the workspace;
    the rope key stays shared. Every chunk but the first reads weights and query again, writes an output of its own and
    merges it (two read, one written). There are `ceil(T / workspace_tokens)` chunks, counted as
    `1 + (T - 1) / workspace_tokens`: never less, equal at `k workspace_tokens + 1`, and a polynomial.
    """
    if workspace_tokens < 1:
        raise ValueError(f"workspace_tokens must be at least 1, got {workspace_tokens}")
    d = dims
    weights = d.N * d.L * (d.P + d.V)
    latent_cache = d.B * d.T * (d.L + d.R)
    query = d.B * d.Sq * d.N * (d.P + d.R)
    output = d.B * d.Sq * d.N * d.V
    workspace = 2 * d.B * d.T * d.N * (d.P + d.V)
    further_chunks = sympy.sympify(d.T - 1) / workspace_tokens
    elements = weights + latent_cache + query + output + workspace + further_chunks * (weights + query + 4 * output)
    return _cost(_expanded_multiply_adds(d, causal), elements, element_size)


def _expanded_multiply_adds(d: Dims, causal: bool) -> sympy.Expr:
    return d.B * d.N * (d.T * d.L * (d.P + d.V) + _pairs(d, causal) * (d.P + d.R + d.V))


def _cost(multiply_adds: Size, elements: Size, element_size: int) -> Cost:
    if element_size < 1:
        raise ValueError(f"element_size must be at least 1 byte, got {element_size}")
    return Cost(sympy.sympify(2 * multiply_adds), sympy.sympify(element_size * elements))


def predicted_seconds(cost: Cost, device: Device) -> float:
    """Roofline time: the larger of FLOPs over FLOP/s and bytes over bytes/s. The cost must hold no symbols."""
    return max(float(cost.flops) / device.flops_per_s, float(cost.bytes) / device.bytes_per_s)


def crossover_queries(T: Size, L: Size, P: Size, V: Size) -> sympy.Expr | None:
    """Query tokens at which absorbing and expanding take equally many FLOPs; fewer favour absorbing.

    `T` is the key tokens in all: a number, a symbol, `sympy.oo`, or an expression in `QUERIES` where the context and
    not the total is given (`QUERIES + 1000`; with no context `QUERIES`). None: they are nowhere equal, for instance
    with no context, where expanding always wins. `B`, `N` and `R` cancel.
    """
    total = sympy.Symbol("T", positive=True)
    dims = Dims(B=1, Sq=QUERIES, T=total, N=1, L=L, P=P, R=0, V=V)
    difference = absorbed(dims, 1).flops - expanded(dims, 1).flops
    if T is sympy.oo:
        solutions = [sympy.limit(s, total, sympy.oo) for s in sympy.solve(difference, QUERIES)]
    else:
        solutions = sympy.solve(difference.subs(total, T), QUERIES)
    possible = [s for s in solutions if s.is_positive is not False and s.is_finite is not False]
    return possible[0] if possible else None


def choose(
    dims: Dims,
    device: Device,
    element_size: int,
    workspace_tokens: int,
    hints: Mapping[sympy.Symbol, int] = MappingProxyType({}),
    *,
    topk: Size | None = None,
    paths: Sequence[Path] = ("absorbed", "chunked"),
) -> Decision:
    """Path with the smallest roofline time, the first of `paths` on a tie, decided where symbols have their `hints`.

    With `topk`, the number of keys that each query names, `sparse` is a last path; not where all keys are named, nor
    where `topk` is no polynomial in the symbols.

    The conditions of the decision are exact (device rates enter as rationals) and are meant as guards of what was
    compiled for it. Symbols stand for integers of at least 1. A condition in one symbol comes as bounds on that
    symbol; one that every such integer fulfils, or that another implies term by term, is left out.

    Raises ValueError where a symbol has no hint.
    """
    times = {path: times_of(path, dims, device, element_size, workspace_tokens) for path in paths}
    if topk is not None and sympy.expand(topk - dims.T) != 0 and sympy.sympify(topk).is_polynomial():
        times["sparse"] = _times(sparse(dims, element_size, topk), device)
    path = _fastest(times, hints)
    symbols = set[sympy.Symbol]().union(*(time.free_symbols for pair in times.values() for time in pair))
    if len(symbols) == 1:
        (symbol,) = symbols
        if all(time.is_polynomial(symbol) for pair in times.values() for time in pair):
            return Decision(path, _bounds(path, times, symbol, hints[symbol]))
    return Decision(path, _inequalities(path, times, hints))


def times_of(path: Path, dims: Dims, device: Device, element_size: int, workspace_tokens: int) -> Times:
    """Seconds for the FLOPs and for the bytes of `absorbed` or `chunked`; the roofline time is the larger one."""
    cost = absorbed(dims, element_size) if path == "absorbed" else chunked(dims, element_size, workspace_tokens)
    return _times(cost, device)


def _times(cost: Cost, device: Device) -> Times:
    return (
        sympy.expand(cost.flops / sympy.Rational(device.flops_per_s)),
        sympy.expand(cost.bytes / sympy.Rational(device.bytes_per_s)),
    )


def _at(expression: sympy.Expr, hints: Mapping[sympy.Symbol, int]) -> sympy.Rational:
    missing = expression.free_symbols - set(hints)
    if missing:
        raise ValueError(f"expected a hint for every symbol of the dims, found none for {sorted(map(str, missing))}")
    return expression.subs(hints)


def _fastest(times: Mapping[Path, Times], hints: Mapping[sympy.Symbol, int]) -> Path:
    return min(times, key=lambda path: max(_at(time, hints) for time in times[path]))


def _bounds(path: Path, times: Mapping[Path, Times], symbol: sympy.Symbol, hint: int) -> tuple[Relational, ...]:
    """The widest range of the one symbol, `hint` in it, in which `path` is the fastest one at every integer.

    The choice can change only at a root of a difference `a - b`, so the integers next to the roots are all to look at.
    """
    next_to_roots: set[int] = set()
    pairs = [(times[p], times[q]) for p, q in combinations(times, 2)]
    for difference in {a - b for p, q in pairs for a in p for b in q}:
        if difference.has(symbol):
            for root in sympy.Poly(difference, symbol).real_roots():
                below, above = int(sympy.ceiling(root)) - 1, int(sympy.floor(root)) + 1
                next_to_roots |= set(range(below, above + 1))
    others = sorted(n for n in next_to_roots if n >= 1 and _fastest(times, {symbol: n}) != path)
    low = tuple(sympy.Ge(symbol, n + 1) for n in others if n < hint)[-1:]
    high = tuple(sympy.Le(symbol, n - 1) for n in others if n > hint)[:1]
    return low + high


def _inequalities(path: Path, times: Mapping[Path, Times], hints: Mapping[sympy.Symbol, int]) -> tuple[Relational, ...]:
    """Polynomial inequalities, true at the hints, that together imply that `path` is the fastest one.

    max(a1, a2) <= max(b1, b2) if each a is <= some b; max(a1, a2) > max(b1, b2) if some a is > b1 and > b2.
    """
    relations: list[Relational] = []
    order = list(times)
    for other in order:
        if other == path:
            continue
        strict = order.index(other) < order.index(path)  # on a tie it would be the other one
        if strict:
            slowest = max(times[other], key=lambda a: _at(a, hints))
            margins = [slowest - b for b in times[path]]
        else:
            margins = [_margin(a, times[other], hints) for a in times[path]]
        needed = [m for m in _without_implied(margins) if m.free_symbols]
        polynomials = [_integer_polynomial(m, strict) for m in needed]
        relations += [_relation(p) for p in polynomials if not _never_negative(p.as_expr())]
    # Some relations sympy knows from the symbols' assumptions.
    return tuple(dict.fromkeys(r for r in relations if r is not sympy.true))


def _margin(time: sympy.Expr, others: Times, hints: Mapping[sympy.Symbol, int]) -> sympy.Expr:
    """`other - time` for the other that needs no condition, else for the one that leaves most room at the hints."""
    margins = [other - time for other in others]
    return next((m for m in margins if _never_negative(m)), max(margins, key=lambda m: _at(m, hints)))


def _never_negative(expression: sympy.Expr) -> bool:
    """True where the expression is proved non-negative for all values of its symbols from 1 on.

    The proof: written in `symbol - 1`, it is a polynomial without negative coefficients.
    """
    symbols = sorted(expression.free_symbols, key=str)
    if not symbols:
        return bool(expression >= 0)
    if not expression.is_polynomial(*symbols):
        return False
    shifted = expression.subs([(s, s + 1) for s in symbols], simultaneous=True)
    return all(coefficient >= 0 for coefficient in sympy.Poly(shifted, *symbols).coeffs())


def _without_implied(margins: Sequence[sympy.Expr]) -> list[sympy.Expr]:
    """The margins without those that are at least as large as one that stays."""
    kept: list[sympy.Expr] = []
    for margin in margins:
        if any(_never_negative(margin - other) for other in kept):
            continue
        kept = [other for other in kept if not _never_negative(other - margin)] + [margin]
    return kept


def _integer_polynomial(margin: sympy.Expr, strict: bool) -> sympy.Poly:
    """Polynomial with integer coefficients that is >= 0 exactly where `margin` is >= 0 (> 0 if `strict`)."""
    polynomial = sympy.Poly(margin)
    _, polynomial = polynomial.clear_denoms(convert=True)
    _, polynomial = polynomial.primitive()
    if all(generator.is_Symbol for generator in polynomial.gens):
        # Symbols are at least 1, so a common power of one does not change the sign.
        _, polynomial = polynomial.terms_gcd()
        used = [g for g, degree in zip(polynomial.gens, polynomial.degree_list(), strict=True) if degree > 0]
        polynomial = sympy.Poly(polynomial.as_expr(), *(used or polynomial.gens))
    return polynomial - 1 if strict else polynomial


def _relation(polynomial: sympy.Poly) -> Relational:
    """`positive terms >= negated negative terms`."""
    terms = [(c, sympy.prod(g**k for g, k in zip(polynomial.gens, m, strict=True))) for m, c in polynomial.terms()]
    left = sympy.Add(*(c * monomial for c, monomial in terms if c > 0))
    right = sympy.Add(*(-c * monomial for c, monomial in terms if c < 0))
    return sympy.Ge(left, right)
