"""The plan of a path for a site, or for groups of heads: the keys and the masks in the forms that it takes."""

from __future__ import annotations

from ..caches.dense import dense_keys, keys_in_sequences
from ..caches.layouts import find_stored_keys
from ..caches.stored import StoredKeys
from ..masks.bounds import Bounds
from ..masks.meaning import Meaning, understand
from ..mla.site import Groups, Site
from ..nodes.refusal import Refusal
from ..trace.trace import Trace
from .carriers import InSequences, sequences_of
from .of_groups import PlanOfGroups
from .path import Path
from .plan import Plan


def plan_of(path: Path, site: Site, meaning: Meaning) -> Plan:
    """A path for a site as it takes it, with the keys as they are stored, if it can read them so, and the masks in the
    first form that it takes for such keys."""
    keys, words = _keys(path, site, meaning)
    masks = (carrier.of(site, meaning, keys) for carrier in path.carriers)
    return Plan(path, keys, next((mask for mask in masks if mask is not None), None), words)


def plan_of_groups(path: Path, groups: Groups, trace: Trace) -> PlanOfGroups:
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
