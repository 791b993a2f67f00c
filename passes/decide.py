"""Decide the path of a site from its sizes and the cost model.

Sizes may be symbolic: the decision is made at their hints, and the inequalities that it rests on become guards of the
compiled graph, so that other sizes either take the same path rightly or compile again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import sympy
import torch
from sympy.core.relational import Relational
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mla_compile.cost import Decision, Device, Dims, Path, choose

from .axes import Size
from .mask import Meaning
from .seen import Seen
from .site import Site
from .source import Refusal, where
from .symbols import Renaming
from .trace import hint_of


@dataclass(frozen=True)
class Choice:
    """The path of a site, why, and the guards that were added for it."""

    path: str
    reason: str
    guards: tuple[str, ...] = ()


def decide(
    site: Site, meaning: Meaning, wanted: str, device: Device, workspace_tokens: int, environment: ShapeEnv | None
) -> Choice:
    """The path of a site: `wanted`, or by the cost model of `device` if that is `auto`.

    Raises:
        Refusal: if rewriting would gain nothing.
    """
    named = Seen(site, meaning).named
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
    topk = named.named.size if named is not None else None
    element_size = site.node.meta["val"].element_size()
    symbols = {s for size in (*sizes.values(), topk or 1) for s in sympy.sympify(size).free_symbols}
    hint = {symbol: hint_of(symbol, environment) for symbol in symbols} if environment is not None else {}
    topk, bounds = (None, ()) if topk is None else _least(topk, hint)
    rename = Renaming()
    renamed = tuple((name, rename(size)) for name, size in sizes.items())
    renamed_topk = rename(topk) if topk is not None else None
    hints = tuple((ours, hint[theirs]) for theirs, ours in rename.renamed.items())
    paths: tuple[Path, ...] = ("absorbed",) if by_hand else ("absorbed", "chunked")
    decision = _choose(renamed, renamed_topk, paths, device, element_size, workspace_tokens, hints)
    if decision.path == "chunked":
        _refuse_opaque(site)
        _refuse_wide_latent(site, sizes)
    conditions = (*map(rename.undo, decision.conditions), *bounds)
    guards = tuple(map(str, conditions))
    for condition in conditions:
        assert environment is not None
        holds = bool(torch.SymBool(_guarded(environment, condition)))
        assert holds, f"the cost model's condition {condition} does not hold at its own hints"
    numbers = ", ".join(f"{name}={sizes[name]}" for name in ("Sq", "T"))
    if topk is not None:
        numbers += f", topk={topk}"
    return Choice(decision.path, f"{_KINDS[decision.path]} ({numbers})", guards)


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
