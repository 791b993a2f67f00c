"""Choose between paths by the cost model, at the hints of sizes: what that rests on becomes guards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

import sympy
from sympy.core.relational import Relational

from mla_compile.cost import Decision, Device, Dims, Named, never_negative, times_of

from ..algebra.renaming import Renaming
from ..algebra.sizes import Size, symbols_in
from ..masks.meaning import Meaning
from ..masks.named_keys import NamedKeys
from ..mla.site import Site
from ..nodes.shapes import hints_of, unbacked_in
from . import all as every
from .choice import Candidates, Choice, numbers
from .either import Either
from .fastest import fastest
from .path import Path
from .plan import Plan
from .setting import IN_THE_EXAMPLE, Setting


def by_cost(setting: Setting, site: Site, meaning: Meaning, candidates: Candidates) -> Choice:
    """The choice of the candidate that takes the least time at the hints of a site's sizes.

    Raises:
        Refusal: if that path gains nothing.
    """
    sizes, keys = _of_sequences(site), NamedKeys.of(site, meaning)
    named = None if keys is None else keys.named
    element_size, paths = site.node.meta["val"].element_size(), candidates.paths
    hint = hints_of((*sizes.values(), 1 if named is None else named.count), setting.environment)
    bounds: tuple[Relational, ...] = ()
    if named is not None:
        least, bounds = _least(named.count, hint)
        named = replace(named, count=least)
    rename = Renaming()
    renamed = tuple((name, rename(size)) for name, size in sizes.items())
    renamed_named = None if named is None else replace(named, count=rename(named.count))
    hints = tuple((ours, hint[theirs]) for theirs, ours in rename.renamed.items())
    if named is None and setting.ranges is None:
        paths = _least_work_of_a_prompt(sizes, paths, element_size, setting.workspace_tokens)
    known = renamed, renamed_named, paths, setting.device, element_size, setting.workspace_tokens, hints
    decision = _fastest(*known)
    path = every.path_named(decision.path)
    conditions = (*map(rename.undo, decision.conditions), *bounds)
    found = numbers(site, named)
    why = f"{path.why} ({found})"
    if setting.ranges is not None:
        always = setting.always(conditions)
        if not always and _may_branch(site, paths):
            return _either(setting, site, candidates.plan, paths, named)
        if not always:
            why += IN_THE_EXAMPLE
        elif any(isinstance(size, sympy.Expr) for size in sizes.values()):
            why = f"the fastest one at all declared sizes ({found})"
    path.refuse(path.as_taken(site), asked=False)
    if setting.ranges is not None:
        return Choice(candidates.plan(path), why)
    if unguarded := setting.unguarded(conditions):
        why += f", taking {', '.join(f'{s} for {hint[s]}' for s in sorted(unguarded, key=str))}"
    return Choice(candidates.plan(path), why, setting.guard((*conditions, *candidates.conditions)))


def _either(
    setting: Setting, site: Site, plan: Callable[[Path], Plan], paths: tuple[Path, ...], named: Named | None
) -> Choice:
    """Both of two paths, between which each run chooses by their times at its sizes."""
    dims, element_size = Dims(**site.sizes), site.node.meta["val"].element_size()
    costs = [path.cost(dims, element_size, setting.workspace_tokens, named) for path in paths]
    first, second = map(plan, paths)
    times = times_of(costs[0], setting.device), times_of(costs[1], setting.device)
    return Choice(Either(first, second, times), f"the faster one at the sizes of each run ({numbers(site, named)})")


def _may_branch(site: Site, paths: tuple[Path, ...]) -> bool:
    """Whether a graph may have both of two paths for a site.

    `torch.cond` compares the strides of its branches: it cannot where only a run knows the output's sizes.
    """
    if site.apart or site.own_ropes or site.attention.packed is not None:
        return False
    known = not (unbacked_in(site.sizes["B"]) or unbacked_in(site.sizes["Sq"]))
    return known and len(paths) == 2 and all(path.may_branch for path in paths)


def _of_sequences(site: Site) -> Mapping[str, Size]:
    """The sizes of a site; where sequences are packed, as if all of them were equally long."""
    packed, sizes = site.attention.packed, site.sizes
    if packed is None:
        return sizes
    count = sympy.sympify(packed.sequences)
    return {**sizes, "B": packed.sequences, "Sq": sizes["Sq"] / count, "T": sizes["T"] / count}


def _least_work_of_a_prompt(
    sizes: Mapping[str, Size], candidates: tuple[Path, ...], element_size: int, workspace_tokens: int
) -> tuple[Path, ...]:
    """For prompts of any length with no context, only the path that computes least at every length, if there is one.

    The others win by a few bytes where prompts are short, for which a guard would compile the graph twice. A size that
    is no number, whatever it is made of, counts as any number from 1 on.
    """
    if not symbols_in(sizes["Sq"]) or sympy.expand(sizes["T"] - sizes["Sq"]) != 0:
        return candidates
    unknown = {
        name: sympy.Symbol(name, integer=True, positive=True) if symbols_in(size) else size
        for name, size in sizes.items()
    }
    dims = Dims(**{**unknown, "T": unknown["Sq"]})
    flops = {path: path.cost(dims, element_size, workspace_tokens, None).flops for path in candidates}
    for path, own in flops.items():
        if all(never_negative(other - own) for other in flops.values()):
            return (path,)
    return candidates


def _least(topk: Size, hints: dict[sympy.Symbol, int]) -> tuple[Size, tuple[Relational, ...]]:
    """The number of named keys, with each `min(k, T)` replaced by what it is at the hints, and where that holds."""
    conditions: tuple[Relational, ...] = ()
    if isinstance(topk, int):
        return topk, conditions
    chosen: dict[sympy.Basic, sympy.Basic] = {}
    for lesser in topk.find(lambda part: type(part).__name__ == "Min"):  # sympy's or torch's
        least, *others = sorted(lesser.args, key=lambda size: size.subs(hints))
        chosen[lesser] = least
        conditions += tuple(sympy.Ge(other, least) for other in others)
    return topk.xreplace(chosen), conditions


@lru_cache(maxsize=256)
def _fastest(
    sizes: tuple[tuple[str, Size], ...],
    named: Named | None,
    paths: tuple[Path, ...],
    device: Device,
    element_size: int,
    workspace_tokens: int,
    hints: tuple[tuple[sympy.Symbol, int], ...],
) -> Decision:
    return fastest(Dims(**dict(sizes)), device, element_size, workspace_tokens, dict(hints), named=named, paths=paths)
