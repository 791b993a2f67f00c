"""Decide the path of a site from its sizes and the cost model.

Sizes may be symbolic: the decision is made at their hints, and the inequalities that it rests on become guards of the
compiled graph, so that other sizes either take the same path rightly or compile again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import sympy
import torch
from sympy.core.relational import Relational
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from mla_compile.cost import Decision, Device, Dims, Path, choose, times_of

from ..algebra.renaming import Renaming
from ..algebra.sizes import Size
from ..masks.meaning import Meaning
from ..masks.named_keys import NamedKeys
from ..mla.site import Site
from ..nodes.refusal import Refusal
from ..nodes.shapes import hints_of, unbacked_in
from ..nodes.source import where
from .by_size import BY_SIZE, BySize

Ranges = Mapping[sympy.Symbol, ValueRanges]


@dataclass(frozen=True)
class Choice:
    """The path of a site, why, and the guards that were added for it."""

    path: str
    reason: str
    guards: tuple[str, ...] = ()
    by_size: BySize | None = None
    """Where the graph has to choose while it runs."""


def decide(
    site: Site,
    meaning: Meaning,
    wanted: str,
    device: Device,
    workspace_tokens: int,
    environment: ShapeEnv | None,
    ranges: Ranges | None = None,
) -> Choice:
    """The path of a site: `wanted`, or by the cost model of `device` if that is `auto`.

    With `ranges`, those of all symbols, there are no guards: a choice that is not the same for all of the sizes is left
    to the graph.

    Raises:
        Refusal: if rewriting would gain nothing.
    """
    named = NamedKeys.of(site, meaning)
    by_hand = site.w_uk is None
    if by_hand and site.attention.opaque is not None:
        raise Refusal(site.node, "expected an up-projection to take from the keys, found scores absorbed by hand")
    if by_hand and (named is None or wanted == "absorbed"):
        return Choice("absorbed", "attends to the latent already: absorbed by hand")
    sizes = site.sizes
    if wanted == "chunked":
        _refuse_opaque(site)
    if (wanted in ("absorbed", "chunked") and not by_hand) or (wanted == "sparse" and named is not None):
        return Choice(wanted, "asked for by mla.path")
    topk = named.count if named is not None else None
    element_size = site.node.meta["val"].element_size()
    hint = hints_of((*sizes.values(), topk or 1), environment) if environment is not None else {}
    topk, bounds = (None, ()) if topk is None else _least(topk, hint)
    rename = Renaming()
    renamed = tuple((name, rename(size)) for name, size in sizes.items())
    renamed_topk = rename(topk) if topk is not None else None
    hints = tuple((ours, hint[theirs]) for theirs, ours in rename.renamed.items())
    paths: tuple[Path, ...] = ("absorbed",) if by_hand else _DENSE
    decision = _choose(renamed, renamed_topk, paths, device, element_size, workspace_tokens, hints)
    conditions = (*map(rename.undo, decision.conditions), *bounds)
    numbers = ", ".join(f"{name}={sizes[name]}" for name in ("Sq", "T"))
    if topk is not None:
        numbers += f", topk={topk}"
    reason = f"{_KINDS[decision.path]} ({numbers})"
    if ranges is not None and all(_holds(condition, ranges) for condition in conditions):
        if any(isinstance(size, sympy.Expr) for size in sizes.values()):
            reason = f"the fastest one at all declared sizes ({numbers})"
    elif ranges is not None:
        # torch.cond compares the strides of its branches, which it cannot where only a run knows the output's sizes.
        comparable = not (unbacked_in(sizes["B"]) or unbacked_in(sizes["Sq"]))
        if paths == _DENSE and named is None and site.attention.opaque is None and comparable:
            times = (times_of(path, Dims(**sizes), device, element_size, workspace_tokens) for path in paths)
            return Choice(BY_SIZE, f"the faster one at the sizes of each run ({numbers})", (), BySize(*times))
        reason += " in the exported example, right for all sizes"
    if decision.path == "chunked":
        _refuse_opaque(site)
        _refuse_wide_latent(site, sizes)
    if ranges is not None:
        return Choice(decision.path, reason)
    unbacked = set[sympy.Symbol]().union(*map(unbacked_in, conditions))
    if unbacked:  # nothing can guard what only a run knows
        reason += f", taking {', '.join(f'{s} for {hint[s]}' for s in sorted(unbacked, key=str))}"
        conditions = tuple(condition for condition in conditions if not condition.free_symbols & unbacked)
    guards = tuple(map(str, conditions))
    for condition in conditions:
        assert environment is not None
        holds = bool(torch.SymBool(_guarded(environment, condition)))
        assert holds, f"the cost model's condition {condition} does not hold at its own hints"
    return Choice(decision.path, reason, guards)


def _holds(condition: Relational, ranges: Ranges) -> bool:
    """Whether a condition `a >= b` or `a <= b` provably holds for all sizes of the ranges."""
    sign = 1 if isinstance(condition, sympy.Ge) else -1
    margin = sympy.expand(sign * (condition.lhs - condition.rhs))
    return bool(bound_sympy(margin, dict(ranges)).lower >= 0)


_DENSE: tuple[Path, ...] = ("absorbed", "chunked")
_KINDS: dict[Path, str] = {
    "absorbed": "few queries meet many keys",
    "chunked": "many queries meet many keys",
    "sparse": "each query names few of many keys",
}


def _least(topk: Size, hints: dict[sympy.Symbol, int]) -> tuple[Size, tuple[Relational, ...]]:
    """The number of named keys, and where that holds: of `min(k, T)` the one that it is at the hints."""
    if isinstance(topk, int) or type(topk).__name__ != "Min":  # sympy's or torch's
        return topk, ()
    least, *others = sorted(topk.args, key=lambda size: size.subs(hints))
    return least, tuple(sympy.Ge(other, least) for other in others)


@lru_cache(maxsize=256)
def _choose(
    sizes: tuple[tuple[str, Size], ...],
    topk: Size | None,
    paths: tuple[Path, ...],
    device: Device,
    element_size: int,
    workspace_tokens: int,
    hints: tuple[tuple[sympy.Symbol, int], ...],
) -> Decision:
    return choose(Dims(**dict(sizes)), device, element_size, workspace_tokens, dict(hints), topk=topk, paths=paths)


def _guarded(environment: ShapeEnv, condition: sympy.Basic) -> object:
    return environment.create_symboolnode(condition).node


_FORCE = "set options={'mla.path': 'absorbed'}"


def _refuse_opaque(site: Site) -> None:
    if site.attention.opaque is not None:
        source = site.attention.opaque.weights.source
        found = where(source) if isinstance(source, fx.Node) else str(source)
        reason = f"expected a sum of products and masks for chunks, found {found} of other scores"
        raise Refusal(site.node, reason, _FORCE)


def _refuse_wide_latent(site: Site, sizes: dict[str, Size]) -> None:
    """With every key expanded anyway, a latent is worth keeping only where it is narrower than what it expands to."""
    latent, expanded = 2 * sympy.sympify(sizes["L"]), sympy.sympify(sizes["N"] * (sizes["P"] + sizes["V"]))
    if latent.is_number and expanded.is_number and latent >= expanded:
        raise Refusal(
            site.node,
            f"expected a latent narrower than the keys and the values it expands to, found width {sizes['L']} "
            f"for {sizes['N']} heads of {sizes['P']} + {sizes['V']}",
            _FORCE,
        )
