"""What paths share in training that are one op, as they are without gradients.

A number that replaces scores, as in `masked_fill`, cuts off their gradients too. Ops add it instead. In a row in which
it replaces all scores, so that all keys weigh the same, the queries are therefore set to zero: no gradient goes through
these, and no key gets one from them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch

from ..caches.stored import StoredKeys
from ..masks.dense import Dense
from ..masks.meaning import Meaning
from ..mla.site import Site
from ..mla.why_not import name
from ..nodes.refusal import Refusal
from .carriers import Carrier, MaskAndOffset
from .one_op import OneOp
from .operands import Operands


class InTraining(OneOp):
    """What the backward of an op leaves of a path: keys in one tensor, under a mask and an offset.

    It is the first base of a path, before the path that it trains.
    """

    carriers: ClassVar[tuple[type[Carrier], ...]] = (MaskAndOffset,)
    may_branch = False
    may_be_asked = False

    def refuse(self, site: Site, *, asked: bool) -> None:
        """Refuse packed sequences too; rope keys of sequences that share a latent, whose keys would be up-projected for
        each of them; and numbers that replace scores beside others that are added: in a row where all scores
        are as low, only some may have lost their gradients."""
        super().refuse(site, asked=asked)
        if site.attention.packed is not None:
            reason = (
                "expected attention in which all queries have the same keys where gradients are "
                "needed, found packed sequences"
            )
            raise Refusal(
                site.node,
                reason,
                "call scaled_dot_product_attention with a mask of the pairs that belong to the same sequence",
            )
        _refuse_ropes_of_sequences(site)
        if _replaces(site) and (site.attention.causal or not all(mask.attends for mask in site.attention.masks)):
            reason = "expected masks that either replace scores by a finite number or add to them, found both"
            raise Refusal(site.node, reason, "fill with -math.inf, or add both masks")

    def can_read(self, keys: StoredKeys, site: Site, meaning: Meaning) -> bool:
        """Keys that are one tensor."""
        return not keys.in_pages and keys.coded is None

    def prefers_lengths(self, device: str) -> bool:
        """Never: every key has a gradient."""
        return False

    def prepared(self, x: Operands) -> Operands:
        """The operands, with zeros in place of queries that have no gradients."""
        if not _replaces(x.site):
            return x
        assert isinstance(x.carrier, MaskAndOffset)
        assert isinstance(x.carrier.told, Dense)
        sees = x.carrier.told.sees(x.read)
        if sees is None:
            return x
        seeing = sees.transpose(1, 2)[..., None]
        return replace(x, q_nope=torch.where(seeing, x.q_nope, 0), q_rope=torch.where(seeing, x.q_rope, 0))


def _refuse_ropes_of_sequences(site: Site) -> None:
    """Refuse rope keys with an axis of the batch that the latent lacks."""
    alone = {*site.batch} - site.latent.axes
    for rope in site.ropes:
        if not rope.key.axes.isdisjoint(alone):
            raise Refusal(
                site.node,
                "expected rope keys of all sequences that share a latent where gradients are needed, found some that "
                f"differ between them: {name(rope.key.read)}",
            )


def _replaces(site: Site) -> bool:
    """Whether a finite number takes the place of scores."""
    return any(mask.attends and not math.isinf(mask.fill) for mask in site.attention.masks)
