"""Decide the path of a site from its sizes and the cost model.

Sizes may be symbolic: the decision is made at their hints, and the inequalities that it rests on become guards of the
compiled graph, so that other sizes either take the same path rightly or compile again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mla_compile.cost import Decision, Device, Dims, choose

from .axes import Size
from .site import Site
from .source import Refusal
from .trace import hint_of


@dataclass(frozen=True)
class Choice:
    """The path of a site, why, and the guards that were added for it."""

    path: str
    reason: str
    guards: tuple[str, ...] = ()


def decide(site: Site, wanted: str, device: Device, workspace_tokens: int, environment: ShapeEnv | None) -> Choice:
    """The path of a site: `wanted`, or by the cost model of `device` if that is `auto`.

    Raises:
        Refusal: if rewriting would gain nothing.
    """
    if site.w_uk is None:
        return Choice("absorbed", "attends to the latent already: absorbed by hand")
    sizes = site.sizes
    if wanted != "auto":
        return Choice(wanted, "asked for by mla.path")
    element_size = site.node.meta["val"].element_size()
    symbols = sorted({s for size in sizes.values() for s in sympy.sympify(size).free_symbols}, key=str)
    hints = tuple((symbol, hint_of(symbol, environment)) for symbol in symbols) if environment is not None else ()
    decision = _choose(tuple(sizes.items()), device, element_size, workspace_tokens, hints)
    if decision.path == "chunked":
        _refuse_wide_latent(site, sizes)
    guards = tuple(str(condition) for condition in decision.conditions)
    for condition in decision.conditions:
        assert environment is not None
        holds = bool(torch.SymBool(_guarded(environment, condition)))
        assert holds, f"the cost model's condition {condition} does not hold at its own hints"
    numbers = ", ".join(f"{name}={sizes[name]}" for name in ("Sq", "T"))
    kind = "few queries meet many keys" if decision.path == "absorbed" else "many queries meet many keys"
    return Choice(decision.path, f"{kind} ({numbers})", guards)


@lru_cache(maxsize=256)
def _choose(
    sizes: tuple[tuple[str, Size], ...],
    device: Device,
    element_size: int,
    workspace_tokens: int,
    hints: tuple[tuple[sympy.Symbol, int], ...],
) -> Decision:
    return choose(Dims(**dict(sizes)), device, element_size, workspace_tokens, dict(hints))


def _guarded(environment: ShapeEnv, condition: sympy.Basic) -> object:
    return environment.create_symboolnode(condition).node


def _refuse_wide_latent(site: Site, sizes: dict[str, Size]) -> None:
    """With every key expanded anyway, a latent is worth keeping only where it is narrower than what it expands to."""
    latent, expanded = 2 * sympy.sympify(sizes["L"]), sympy.sympify(sizes["N"] * (sizes["P"] + sizes["V"]))
    if latent.is_number and expanded.is_number and latent >= expanded:
        raise Refusal(
            site.node,
            f"expected a latent narrower than the keys and the values it expands to, found width {sizes['L']} "
            f"for {sizes['N']} heads of {sizes['P']} + {sizes['V']}",
        )
