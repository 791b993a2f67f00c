"""Choose what a site becomes: its path, by sizes and the cost model, and how that reads the keys and takes the masks.

Sizes may be symbolic: the decision is made at their hints, and the inequalities that it rests on become guards of the
compiled graph, so that other sizes either rightly take the same path or compile again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import sympy
import torch
from sympy.core.relational import Relational
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from mla_compile.cost import Decision, Device, Dims, never_negative, times_of

from ..algebra.renaming import Renaming
from ..algebra.sizes import Size, symbols_in
from ..caches.dense import dense_keys, keys_in_sequences
from ..caches.layouts import find_stored_keys
from ..caches.stored import StoredKeys
from ..masks.bounds import Bounds
from ..masks.meaning import Meaning, understand
from ..masks.named_keys import NamedKeys
from ..mla.site import Groups, Site
from ..nodes.refusal import Refusal
from ..nodes.shapes import hints_of, unbacked_in
from ..trace.trace import Trace
from . import all as every
from .agreement import NO_AGREEMENT, NOTHING, Agreement
from .carriers import InSequences, sequences_of
from .either import Either
from .fastest import fastest
from .of_groups import PlanOfGroups
from .of_ranks import OfRanks
from .path import Path
from .plan import Plan
from .values import ValuesAlone, pays

_VALUES = ValuesAlone()
_IN_THE_EXAMPLE = " in the exported example, right for all sizes"
Ranges = Mapping[sympy.Symbol, ValueRanges]


@dataclass(frozen=True)
class Choice:
    """What a site becomes, why, and the guards that were added for it."""

    plan: Plan | Either
    why: str
    guards: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """What reports call the path."""
        return self.plan.word

    @property
    def reason(self) -> str:
        """A sentence for the report: why this path, and how it reads the keys."""
        return "; ".join(filter(None, (self.why, self.plan.words)))


@dataclass(frozen=True)
class _Candidates:
    """The paths to choose from, the plan of a site for each, and the conditions under which that holds."""

    paths: tuple[Path, ...]
    plan: Callable[[Path], Plan]
    conditions: tuple[Relational, ...] = ()


@dataclass(frozen=True)
class Chooser:
    """Chooses for the sites of one graph.

    Raises:
        ValueError: if no path is called `wanted`.
    """

    wanted: str
    """The word of a path, taken at every site that it is a path of, or `auto`."""
    device: Device
    workspace_tokens: int
    environment: ShapeEnv | None
    ranges: Ranges | None = None
    """The ranges of all symbols, if the graph takes no guards: where no path is the fastest at all sizes, the graph may
    have to choose."""
    training: bool = False
    """Whether the graph needs gradients."""
    agreement: Agreement = NO_AGREEMENT
    """What the ranks of a group that shares out keys agree on."""

    def __post_init__(self) -> None:
        every.check_asked(self.wanted)

    def __call__(self, site: Site, meaning: Meaning, trace: Trace) -> Choice:
        """The choice for a site.

        Raises:
            Refusal: if rewriting would gain nothing.
        """
        if site.unproved_keys is not None:
            return self._of_values_alone(site, meaning)
        paths = every.paths_of(site, meaning, training=self.training)
        asked = next((path for path in paths if path.word == self.wanted), None)
        candidates = self._candidates(site, meaning, trace, paths if asked is None else (asked,))
        settled = asked or (candidates.paths[0] if len(candidates.paths) == 1 else None)
        if settled is None:
            return self._by_cost(site, meaning, candidates)
        settled.refuse(settled.as_taken(site), asked=asked is not None)
        why = settled.as_written(site) or (settled.why if asked is None else "asked for by mla.path")
        return Choice(candidates.plan(settled), why, self._guard(candidates.conditions))

    def where_values_pay(self, site: Site) -> tuple[Relational, ...]:
        """The conditions under which the values of a site whose keys stay are better up-projected after their sum.

        Raises:
            Refusal: that of its keys, if this does not pay here. If something else is in the way, it says what.
        """
        why, device = site.unproved_keys, site.node.meta["val"].device.type
        assert why is not None
        if self.wanted not in (every.AUTO, _VALUES.word):
            raise why
        conditions: tuple[Relational, ...] = ()
        if self.wanted == every.AUTO:
            hints = hints_of(site.sizes.values(), self.environment)
            saving = pays(site, self.device, hints)
            if saving is None or any(map(unbacked_in, saving.conditions)):
                raise why
            if self.ranges is not None and not all(_holds(condition, self.ranges) for condition in saving.room):
                reason = (
                    f"{why.reason}; values alone are not absorbed either, as some declared sizes "
                    "have more scores than values"
                )
                raise replace(why, reason=reason)
            conditions = saving.conditions
        if self.training:
            raise replace(why, reason=f"{why.reason}; values alone are absorbed only without gradients")
        if device != "cpu":
            raise replace(why, reason=f"{why.reason}; values alone are absorbed only on cpu, not on {device}")
        return conditions

    def _of_values_alone(self, site: Site, meaning: Meaning) -> Choice:
        conditions = self.where_values_pay(site)
        why = f"{_VALUES.why} ({_numbers(site)})" if self.wanted == every.AUTO else "asked for by mla.path"
        if self.ranges is not None and not all(_holds(condition, self.ranges) for condition in conditions):
            why += _IN_THE_EXAMPLE
        guards = self._guard(conditions) if self.ranges is None else ()
        return Choice(plan_of(_VALUES, site, meaning), f"{why}; keys as they are: {site.unproved_keys}", guards)

    def _candidates(self, site: Site, meaning: Meaning, trace: Trace, paths: tuple[Path, ...]) -> _Candidates:
        """The paths that leave keys on the ranks that have them, if there are any and that pays; else all."""

        def gathered(why: str, *conditions: Relational) -> _Candidates:
            def plan(path: Path) -> Plan:
                own = path.as_taken(site)
                own_meaning = meaning if own is site else understand(own, trace)
                plain = plan_of(path, own, own_meaning) if site.groups is None else of_groups(path, site.groups, trace)
                return replace(plain, words="; ".join(filter(None, (plain.words, why and f"gathers keys: {why}"))))

            return _Candidates(paths, plan, conditions)

        alone = self.ranges is None and site.groups is None and not (site.apart or site.own_ropes)
        hints: dict[sympy.Symbol, int] = {}
        if self.agreement.same != NOTHING:
            hints = hints_of(site.sizes.values(), self.environment)
        of_ranks = OfRanks.of(site, trace, self.agreement, paths, hints) if alone else None
        if of_ranks is None or isinstance(of_ranks, str):
            return gathered(of_ranks or "")
        able = tuple(path for path in paths if of_ranks.takes(path))
        pays = of_ranks.pays
        if unbacked_in(pays):
            return gathered("sizes that are known only at run time")
        if not pays.subs(hints):
            return gathered("that moves fewer bytes than exchanging outputs", sympy.Not(pays))
        return _Candidates(able, of_ranks.plan, (pays,))

    def _guard(self, conditions: Iterable[Relational]) -> tuple[str, ...]:
        """Add guards for the conditions that depend on symbols, and return them as text."""
        guarded = [condition for condition in conditions if condition.free_symbols]
        for condition in guarded:
            assert self.environment is not None
            holds = bool(torch.SymBool(_guarded(self.environment, condition)))
            assert holds, f"the cost model's condition {condition} does not hold at its own hints"
        return tuple(map(str, guarded))

    def _by_cost(self, site: Site, meaning: Meaning, candidates: _Candidates) -> Choice:
        sizes, named = _of_sequences(site), NamedKeys.of(site, meaning)
        topk = None if named is None else named.count
        element_size, paths = site.node.meta["val"].element_size(), candidates.paths
        hint = hints_of((*sizes.values(), topk or 1), self.environment)
        topk, bounds = (None, ()) if topk is None else _least(topk, hint)
        rename = Renaming()
        renamed = tuple((name, rename(size)) for name, size in sizes.items())
        renamed_topk = rename(topk) if topk is not None else None
        hints = tuple((ours, hint[theirs]) for theirs, ours in rename.renamed.items())
        if topk is None and self.ranges is None:
            paths = _least_work_of_a_prompt(sizes, paths, element_size, self.workspace_tokens)
        known = renamed, renamed_topk, paths, self.device, element_size, self.workspace_tokens, hints
        decision = _fastest(*known)
        path = every.path_named(decision.path)
        conditions = (*map(rename.undo, decision.conditions), *bounds)
        numbers = _numbers(site, topk)
        why = f"{path.why} ({numbers})"
        if self.ranges is not None:
            always = all(_holds(condition, self.ranges) for condition in conditions)
            if not always and _may_branch(site, paths):
                return self._either(site, candidates.plan, paths, topk)
            if not always:
                why += _IN_THE_EXAMPLE
            elif any(isinstance(size, sympy.Expr) for size in sizes.values()):
                why = f"the fastest one at all declared sizes ({numbers})"
        path.refuse(path.as_taken(site), asked=False)
        if self.ranges is not None:
            return Choice(candidates.plan(path), why)
        unbacked = set[sympy.Symbol]().union(*map(unbacked_in, conditions))
        if unbacked:  # nothing can guard what only a run knows
            why += f", taking {', '.join(f'{s} for {hint[s]}' for s in sorted(unbacked, key=str))}"
            conditions = tuple(condition for condition in conditions if not condition.free_symbols & unbacked)
        return Choice(candidates.plan(path), why, self._guard((*conditions, *candidates.conditions)))

    def _either(self, site: Site, plan: Callable[[Path], Plan], paths: tuple[Path, ...], topk: Size | None) -> Choice:
        """Both of two paths, between which each run chooses by their times at its sizes."""
        dims, element_size = Dims(**site.sizes), site.node.meta["val"].element_size()
        costs = [path.cost(dims, element_size, self.workspace_tokens, topk) for path in paths]
        first, second = map(plan, paths)
        times = times_of(costs[0], self.device), times_of(costs[1], self.device)
        return Choice(Either(first, second, times), f"the faster one at the sizes of each run ({_numbers(site, topk)})")


def _numbers(site: Site, topk: Size | None = None) -> str:
    """The sizes on which a choice rests most, for the report."""
    numbers = ", ".join(f"{name}={site.sizes[name]}" for name in ("Sq", "T"))
    if site.attention.packed is not None:
        numbers += f" in {site.attention.packed.sequences} sequences"
    return numbers if topk is None else f"{numbers}, topk={topk}"


def _may_branch(site: Site, paths: tuple[Path, ...]) -> bool:
    """Whether a graph may have both of two paths for a site.

    `torch.cond` compares the strides of its branches: it cannot where only a run knows the output's sizes.
    """
    if site.apart or site.own_ropes or site.attention.packed is not None:
        return False
    known = not (unbacked_in(site.sizes["B"]) or unbacked_in(site.sizes["Sq"]))
    return known and len(paths) == 2 and all(path.may_branch for path in paths)


def plan_of(path: Path, site: Site, meaning: Meaning) -> Plan:
    """A path for a site as it takes it, with the keys as they are stored, if it can read them so, and the masks in the
    first form that it takes for such keys."""
    keys, words = _keys(path, site, meaning)
    masks = (carrier.of(site, meaning, keys) for carrier in path.carriers)
    return Plan(path, keys, next((mask for mask in masks if mask is not None), None), words)


def of_groups(path: Path, groups: Groups, trace: Trace) -> PlanOfGroups:
    """A path for each group of heads, with the keys and the masks of that group.

    Raises:
        Refusal: if one of the groups cannot take the path.
    """
    sites = tuple(map(path.as_taken, groups.sites))
    meanings = [understand(site, trace) for site in sites]
    if not all(path.takes(site, meaning) for site, meaning in zip(sites, meanings, strict=True)):
        reason = f"expected groups of heads that can all be {path.word}, found one that cannot"
        raise Refusal(groups.attention.node, reason)
    for site in sites:
        path.refuse(site, asked=True)
    plans = tuple(plan_of(path, site, meaning) for site, meaning in zip(sites, meanings, strict=True))
    words = f"a latent for each of {len(plans)} groups of heads", plans[0].words
    return PlanOfGroups(path, plans[0].keys, plans[0].mask, "; ".join(filter(None, words)), sites, plans)


def _keys(path: Path, site: Site, meaning: Meaning) -> tuple[StoredKeys, str]:
    if InSequences in path.carriers and sequences_of(site, meaning) is not None:
        packed = keys_in_sequences(site)
        return packed, packed.words
    if site.second_latent is not None or any(map(site.differs, site.ropes)):
        return dense_keys(site), ""
    stored = find_stored_keys(site)
    if stored is not None and path.can_read(stored, site, meaning):
        return stored, stored.words
    device = site.node.meta["val"].device.type
    dense = dense_keys(site, up_to_lengths=path.prefers_lengths(device) and _has_lengths(site, meaning))
    return dense, dense.words if stored is None else stored.otherwise or dense.words


def _has_lengths(site: Site, meaning: Meaning) -> bool:
    """Whether the masks of a site are numbers of keys, some of which only a run knows."""
    bounds = Bounds.of(site, meaning)
    return bounds is not None and bool(bounds.reads)


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


def _holds(condition: Relational, ranges: Ranges) -> bool:
    """Whether a condition `a >= b` or `a <= b` provably holds for all sizes of the ranges."""
    sign = 1 if isinstance(condition, sympy.Ge) else -1
    margin = sympy.expand(sign * (condition.lhs - condition.rhs))
    return bool(bound_sympy(margin, dict(ranges)).lower >= 0)


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
    topk: Size | None,
    paths: tuple[Path, ...],
    device: Device,
    element_size: int,
    workspace_tokens: int,
    hints: tuple[tuple[sympy.Symbol, int], ...],
) -> Decision:
    return fastest(Dims(**dict(sizes)), device, element_size, workspace_tokens, dict(hints), topk=topk, paths=paths)


def _guarded(environment: ShapeEnv, condition: sympy.Basic) -> object:
    return environment.create_symboolnode(condition).node
