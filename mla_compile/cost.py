"""Model the FLOPs, bytes and time of an MLA site on a device, and find the fastest of several paths.

Each path states its own cost; see `mla_compile.passes.paths`. Symbols and shapes are those of `ops`. Only work that
differs between the paths is counted: absorb or expand products, scores and values. Projections, rope, norms and the
cache write are the same for all paths.

A FLOP is half a multiply-add. A byte is counted once for each time the path cannot avoid moving it through memory:
weights, latent cache, query, output, and the path's own workspace once written and once read. Scores are not counted,
since no path here has to store them.

Masks: with `causal`, only the query-key pairs that a causal mask leaves are counted, `Sq T - Sq (Sq - 1) / 2`.
Decisions between paths that attend to all keys count all pairs, because it hardly changes them: for DeepSeek-V3's dims
and a context of 1000 the crossover moves from 148.6 to 158.1 queries. Where queries name keys (`Named`), it may halve
what the other paths compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import TypeAlias

import sympy
from sympy.core.relational import Relational

Size: TypeAlias = int | sympy.Expr
Times: TypeAlias = tuple[sympy.Expr, sympy.Expr]
"""Seconds for the FLOPs and seconds for the bytes, exact."""


@dataclass(frozen=True)
class Dims:
    """Sizes of one MLA site; each a positive integer or a sympy expression that stands for one."""

    B: Size
    """Sequences."""
    Sq: Size
    """Query tokens of each sequence."""
    T: Size
    """Key tokens of each sequence: the context and the new tokens."""
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
    Lk: Size = 0
    """Width of the latent of the keys, where it is not that of the values; 0 where one latent is that of both."""

    @property
    def expanding(self) -> Size:
        """Multiply-adds of up-projecting a token's key and value for one head; also elements of a head's weights."""
        return self.matched * self.P + self.L * self.V

    @property
    def matched(self) -> Size:
        """Columns of a token that a query in latent space is multiplied with, without the rope key."""
        return self.L if self.Lk == 0 else self.Lk

    @property
    def weights(self) -> Size:
        """Elements of the up-projections."""
        return self.N * self.expanding

    @property
    def latent_cache(self) -> Size:
        """Elements of latents and rope keys."""
        return self.B * self.T * (self.L + self.Lk + self.R)

    @property
    def query(self) -> Size:
        """Elements of the queries."""
        return self.B * self.Sq * self.N * (self.P + self.R)

    @property
    def output(self) -> Size:
        """Elements of the output."""
        return self.B * self.Sq * self.N * self.V


@dataclass(frozen=True)
class Named:
    """Keys that queries name: each attends to these alone."""

    count: Size
    """The number of keys that each query names."""
    causal: bool
    """Whether a causal limit hides keys too. Paths that attend to all keys then compute only the pairs it leaves."""


def attends_causally(named: Named | None) -> bool:
    """Whether the cost of attending to all keys counts only the pairs that a causal limit leaves."""
    return named is not None and named.causal


@dataclass(frozen=True)
class Cost:
    """The work of one path at one site."""

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
                    f"Device {self.name!r}: expected a positive and finite {field}, found {getattr(self, field)}"
                )


@dataclass(frozen=True)
class Link:
    """The connection between any two devices."""

    bandwidth: float
    """The bytes/s that a device receives."""
    latency: float
    """The seconds that an empty message takes."""

    def __post_init__(self) -> None:
        if not (0 < self.bandwidth < float("inf") and 0 <= self.latency < float("inf")):
            raise ValueError(f"expected a positive bandwidth and a latency, both finite, found {self}")

    def time(self, messages: int, received: float) -> float:
        """The seconds that sequential messages with so many received bytes in all take."""
        return messages * self.latency + received / self.bandwidth


@dataclass(frozen=True)
class Decision:
    """The path that a site should take, and the sizes for which this holds."""

    path: str
    """The name of the path."""
    conditions: tuple[Relational, ...]
    """Inequalities `a >= b` or `a <= b` between polynomials with integer coefficients in the symbols of the dims.
    Wherever all of them hold, the roofline chooses this path. If there are none, it always does."""


def pairs(dims: Dims, causal: bool) -> sympy.Expr:
    """The query-key pairs of one head of one sequence. Causal queries are the last `Sq` of the `T` tokens."""
    dense = sympy.sympify(dims.Sq * dims.T)
    return dense - sympy.Rational(1, 2) * dims.Sq * (dims.Sq - 1) if causal else dense


def cost_of(multiply_adds: Size, elements: Size, element_size: int) -> Cost:
    """The cost of `multiply_adds`, and of moving `elements` of `element_size` bytes.

    Raises:
        ValueError: if `element_size` is less than 1.
    """
    if element_size < 1:
        raise ValueError(f"element_size: expected at least 1 byte, found {element_size}")
    return Cost(sympy.sympify(2 * multiply_adds), sympy.sympify(element_size * elements))


def predicted_seconds(cost: Cost, device: Device) -> float:
    """Roofline time: the larger of FLOPs over FLOP/s and bytes over bytes/s. The cost must not contain symbols."""
    return max(float(cost.flops) / device.flops_per_s, float(cost.bytes) / device.bytes_per_s)


def times_of(cost: Cost, device: Device) -> Times:
    """Seconds for the FLOPs and for the bytes; the roofline time is the larger one."""
    return (
        sympy.expand(cost.flops / sympy.Rational(device.flops_per_s)),
        sympy.expand(cost.bytes / sympy.Rational(device.bytes_per_s)),
    )


def decide(times: Mapping[str, Times], hints: Mapping[sympy.Symbol, int] = MappingProxyType({})) -> Decision:
    """Choose the path with the smallest roofline time, the first one on a tie, at the values of symbols in `hints`.

    The conditions of the decision are exact (device rates enter as rationals) and serve as guards of the code that is
    compiled for it. Symbols stand for integers of at least 1. If there is a single symbol, the conditions are bounds on
    it. Conditions that always hold, or that another one implies term by term, are omitted.

    Raises:
        ValueError: if a symbol has no hint.
    """
    path = _fastest(times, hints)
    symbols = set[sympy.Symbol]().union(*(time.free_symbols for pair in times.values() for time in pair))
    if len(symbols) == 1:
        (symbol,) = symbols
        if all(time.is_polynomial(symbol) for pair in times.values() for time in pair):
            return Decision(path, _bounds(path, times, symbol, hints[symbol]))
    return Decision(path, _inequalities(path, times, hints))


def never_negative(expression: sympy.Expr) -> bool:
    """Whether the expression can be proved non-negative for all values of its symbols from 1 on.

    The proof: as a polynomial in `symbol - 1`, it has no negative coefficients.
    """
    symbols = sorted(expression.free_symbols, key=str)
    if not symbols:
        return bool(expression >= 0)
    if not expression.is_polynomial(*symbols):
        return False
    shifted = expression.subs([(s, s + 1) for s in symbols], simultaneous=True)
    return all(coefficient >= 0 for coefficient in sympy.Poly(shifted, *symbols).coeffs())


def _at(expression: sympy.Expr, hints: Mapping[sympy.Symbol, int]) -> sympy.Rational:
    missing = expression.free_symbols - set(hints)
    if missing:
        raise ValueError(f"expected a hint for every symbol of the dims, found none for {sorted(map(str, missing))}")
    return expression.subs(hints)


def _fastest(times: Mapping[str, Times], hints: Mapping[sympy.Symbol, int]) -> str:
    return min(times, key=lambda path: max(_at(time, hints) for time in times[path]))


def _bounds(path: str, times: Mapping[str, Times], symbol: sympy.Symbol, hint: int) -> tuple[Relational, ...]:
    """The widest range of the only symbol that contains `hint` and in which `path` is the fastest at every integer.

    The choice can change only at a root of a difference `a - b`, so only the integers next to roots need a look.
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


def _inequalities(path: str, times: Mapping[str, Times], hints: Mapping[sympy.Symbol, int]) -> tuple[Relational, ...]:
    """Polynomial inequalities, true at the hints, that together imply that `path` is the fastest.

    max(a1, a2) <= max(b1, b2) if each a is <= some b; max(a1, a2) > max(b1, b2) if some a is > b1 and > b2.
    """
    relations: list[Relational] = []
    order = list(times)
    for other in order:
        if other == path:
            continue
        strict = order.index(other) < order.index(path)  # on a tie, the earlier path is chosen
        if strict:
            slowest = max(times[other], key=lambda a: _at(a, hints))
            margins = [slowest - b for b in times[path]]
        else:
            margins = [_margin(a, times[other], hints) for a in times[path]]
        needed = [m for m in _without_implied(margins) if m.free_symbols]
        polynomials = [_integer_polynomial(m, strict) for m in needed]
        relations += [_relation(p) for p in polynomials if not never_negative(p.as_expr())]
    # sympy evaluates some relations to true by the symbols' assumptions.
    return tuple(dict.fromkeys(r for r in relations if r is not sympy.true))


def _margin(time: sympy.Expr, others: Times, hints: Mapping[sympy.Symbol, int]) -> sympy.Expr:
    """The `other - time` that is never negative if there is one, else the largest at the hints."""
    margins = [other - time for other in others]
    return next((m for m in margins if never_negative(m)), max(margins, key=lambda m: _at(m, hints)))


def _without_implied(margins: Sequence[sympy.Expr]) -> list[sympy.Expr]:
    """The margins without those that are never smaller than another one that is kept."""
    kept: list[sympy.Expr] = []
    for margin in margins:
        if any(never_negative(margin - other) for other in kept):
            continue
        kept = [other for other in kept if not never_negative(other - margin)] + [margin]
    return kept


def _integer_polynomial(margin: sympy.Expr, strict: bool) -> sympy.Poly:
    """A polynomial with integer coefficients that is >= 0 exactly where `margin` is >= 0 (> 0 if `strict`)."""
    polynomial = sympy.Poly(margin)
    _, polynomial = polynomial.clear_denoms(convert=True)
    _, polynomial = polynomial.primitive()
    if all(generator.is_Symbol for generator in polynomial.gens):
        # Symbols are at least 1, so dividing by a common power of one does not change the sign.
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
