"""Trained by heads: functions of the scores where gradients are needed.

Before   s = q (latent @ W_UK + k_rope)^T;  o = softmax(f(s)) (latent @ W_UV);  kept for backward: q, k, v, all scores
After    for heads in groups:  the same for these heads;  kept for backward: q, latent, k_rope and what f reads

The backward is a loop over the groups too: scores are computed again, and f is differentiated as torch does it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..code.differentiable import over_groups_with_gradients
from ..code.loops import Attend, HeadDims
from ..masks.meaning import Meaning
from ..mla.site import Site
from ..nodes.refusal import Refusal
from .by_heads import ByHeads, heads_at_a_time
from .trained_with_scores import TrainedWithScores

SCORES_BYTES = 1 << 24
"""The most bytes of scores in float32 at a time; one head alone may have more.

The backward of a turn has five tensors of that size: products, scores, weights and gradients. For 1,024 tokens, a layer
of DeepSeek-V2-Lite's dims takes 150 MiB with this limit, 349 MiB with four times as much, and 255 in stock Inductor.
"""


class TrainedByHeads(ByHeads):
    """One group of heads after the other, forward and backward."""

    name = "trained by heads"
    why = "keys, values and a function of the scores are computed again for gradients, a group of heads at a time"
    may_be_asked = False

    def takes(self, site: Site, meaning: Meaning) -> bool:
        """Sites whose softmax is of a function of each score by itself, though it refuses some of them."""
        return site.attention.opaque is not None and not TrainedWithScores().takes(site, meaning)

    def refuse(self, site: Site, *, asked: bool) -> None:
        """Refuse as without gradients, and sites without up-projections, whose weights tell heads from queries."""
        if site.absorbed_by_hand:
            reason = (
                "expected an up-projection that tells heads from queries, found a function of "
                "scores that are absorbed by hand"
            )
            raise Refusal(site.node, reason)
        super().refuse(site, asked=asked)

    def _by_groups(self, attend: Attend, tensors: Sequence[Tensor], dims: HeadDims, site: Site, out: Tensor) -> Tensor:
        """In a loop even where one turn is enough, so that what it computes is not kept."""
        return over_groups_with_gradients(attend, tensors, dims, heads_at_a_time(site, SCORES_BYTES), out)
