"""Absorbed: queries attend to the latents.

o = latent_attention(q_nope @ W_UK, q_rope, latent, k_rope) @ W_UV
o = paged_latent_attention(q_nope @ W_UK, q_rope, pages, block_table) @ W_UV, for keys in pages
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from mla_compile.cost import Cost, Dims, Named, attends_causally, cost_of, pairs

from ..caches.stored import StoredKeys
from ..masks.meaning import Meaning
from ..mla.site import Site
from .carriers import Carrier, InSequences, Lengths, MaskAndOffset
from .exchange import Op
from .in_sequences import Blocks
from .one_op import OneOp
from .operands import Operands

_LOOK_AT_MASKS = {"cpu"}
"""Devices whose kernels look up in a mask which keys are seen, and touch no others."""


_ROWS = 128
"""How many heads times queries of a sequence attend to its keys together: the rows of a kernel's tile."""


class Absorbed(OneOp):
    """One attention of all heads over the latents, between two products for each head."""

    name = "absorbed"
    why = "few queries meet many keys"
    carriers: ClassVar[tuple[type[Carrier], ...]] = (InSequences, Lengths, MaskAndOffset)
    may_branch = True

    def takes(self, site: Site, meaning: Meaning) -> bool:
        """All sites whose scores are a sum."""
        return site.attention.opaque is None

    def as_written(self, site: Site) -> str:
        """A sentence where the code lacks an up-projection of the keys, the values, or both."""
        if site.apart:
            return ""
        match site.w_uk is None, site.w_uv is None:
            case True, True:
                return "attends to the latent already: absorbed by hand"
            case True, False:
                return "the keys are the latent already: absorbed by hand"
            case False, True:
                return "the values are the latent already: absorbed by hand"
        return ""

    def cost(self, dims: Dims, element_size: int, workspace_tokens: int, named: Named | None) -> Cost:
        """See `absorbed_cost`."""
        return absorbed_cost(dims, element_size, causal=attends_causally(named))

    def prefers_lengths(self, device: str) -> bool:
        """Where kernels do not look at masks: for a static cache under CUDA graphs, a mask over all that it has room
        for would be all that they know."""
        return device not in _LOOK_AT_MASKS

    def exchanges(self, *, of_latents: bool) -> bool:
        """Always: to the latents, any row may be a head."""
        return True

    def op(self, keys: StoredKeys) -> str:
        """One op for keys in pages, another for all others."""
        return "paged_latent_attention" if keys.in_pages else "latent_attention"

    def attend(self, op: Op, x: Operands, workspace_tokens: int) -> tuple[Tensor, Tensor]:
        """Attention between the products with `W_UK` and `W_UV`."""
        if isinstance(x.carrier, InSequences):
            w_uk, w_uv = x.weights()
            blocks = Blocks.of(x, x.carrier.told, max(_ROWS // x.q_nope.shape[2], 1))
            q_latent, q_rope = blocks.split(x.q_latent(w_uk)), blocks.split(x.q_rope)
            part = op(
                *(q_latent, q_rope, x.latent, x.k_rope, blocks.table, blocks.lengths, blocks.causal, x.scale),
                mask=blocks.mask,
                first_positions=blocks.positions,
            )
            o, lse = blocks.joined(*part)
        elif x.keys.in_pages:
            w_uk, w_uv = x.weights()
            q_latent, table = x.q_latent(w_uk), x.table()
            mask, causal, lengths, positions = x.lengths(table)
            operands = q_latent, x.q_rope, x.latent, x.k_rope, table, lengths, causal, x.scale, x.scales
            o, lse = op(*operands, mask=mask, first_positions=positions)
        else:
            mask, offset = x.mask()
            w_uk, w_uv = x.weights()
            q_latent = x.q_latent(w_uk)
            o, lse = op(q_latent, x.q_rope, x.latent, x.k_rope, mask, offset, x.scale)
        return x.up_projected(o, w_uv), lse


def absorbed_cost(dims: Dims, element_size: int, *, causal: bool = False) -> Cost:
    """Cost of attending in latent space; `element_size` is the bytes of one element.

    Workspace: the absorbed query and the output in latent space, `[B, Sq, N, L]` each; the query has the width of the
    keys' latent, if that is another.
    """
    d = dims
    multiply_adds = d.B * d.N * (d.Sq * d.expanding + pairs(d, causal) * (d.matched + d.L + d.R))
    workspace = 2 * d.B * d.Sq * d.N * (d.matched + d.L)
    return cost_of(multiply_adds, d.weights + d.latent_cache + d.query + d.output + workspace, element_size)
