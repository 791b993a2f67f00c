"""Sparse: queries attend to the latents of the keys that they name.

o = sparse_latent_attention(q_nope @ W_UK, q_rope, latent, k_rope, indices) @ W_UV
"""

from __future__ import annotations

import sympy
from torch import Tensor

from mla_compile.cost import Cost, Dims, Named, Size, cost_of

from ..caches.stored import StoredKeys
from ..masks.meaning import Meaning
from ..masks.named_keys import NamedKeys
from ..mla.site import Site
from .carriers import Indices
from .exchange import Op
from .one_op import OneOp
from .operands import Operands


class Sparse(OneOp):
    """Absorbed attention over the keys that an indexer names, read where they are: in a pool, or coded."""

    name = "sparse"
    why = "each query names few of many keys"
    carriers = (Indices,)
    may_be_asked = False

    def takes(self, site: Site, meaning: Meaning) -> bool:
        """Sites whose masks name keys for all heads alike.

        Where a query that sees no key attends to all alike, the log-sum-exp of its scores is not told, and then nor is
        whether its weights are numbers.
        """
        told = not (meaning.uniform_when_empty and site.attention.numbers)
        return told and NamedKeys.of(site, meaning) is not None

    def cost(self, dims: Dims, element_size: int, workspace_tokens: int, named: Named | None) -> Cost:
        """See `sparse_cost`.

        Raises:
            ValueError: without `named`.
        """
        if named is None:
            raise ValueError("the cost of the sparse path takes a number of named keys")
        return sparse_cost(dims, element_size, named.count)

    def competes(self, dims: Dims, named: Named | None) -> bool:
        """Not where all keys are named, nor where their number is not a polynomial in the symbols."""
        if named is None:
            return False
        return sympy.expand(named.count - dims.T) != 0 and bool(sympy.sympify(named.count).is_polynomial())

    def can_read(self, keys: StoredKeys, site: Site, meaning: Meaning) -> bool:
        """All keys, but pages only if an index is a place in the table and a query without keys attends to none."""
        return not keys.in_pages or (len(site.attention.keys) == 1 and not meaning.uniform_when_empty)

    def op(self, keys: StoredKeys) -> str:
        """One op for all keys."""
        return "sparse_latent_attention"

    def attend(self, op: Op, x: Operands, workspace_tokens: int) -> tuple[Tensor, Tensor]:
        """Attention between the products with `W_UK` and `W_UV`."""
        named = x.named()
        if x.keys.in_pages:  # every query by itself, with the rows of the whole pool as one sequence
            w_uk, w_uv = x.weights()
            q_latent = x.q_latent(w_uk)
            slots = named.slots(x.read, x.table(), x.latent.shape[1])
            q, q_rope, latent, k_rope, slots = (
                t.flatten(0, 1).unsqueeze(0) for t in (q_latent, x.q_rope, x.latent, x.k_rope, slots)
            )
            scales = None if x.scales is None else x.scales.flatten(0, 1).unsqueeze(0)
            o, lse = op(q, q_rope, latent, k_rope, slots, None, None, x.scale, False, scales)
            o, lse = o.view(*q_latent.shape), lse.view(*q_latent.shape[:3])
        else:
            indices, offset = named.indices(x.read)
            w_uk, w_uv = x.weights()
            q, alike = x.q_latent(w_uk), named.uniform_when_empty
            o, lse = op(q, x.q_rope, x.latent, x.k_rope, indices, None, offset, x.scale, alike, x.scales)
        return x.up_projected(o, w_uv), lse


def sparse_cost(dims: Dims, element_size: int, topk: Size) -> Cost:
    """Cost of attending in latent space to the `topk` keys that each query names.

    Every query gathers its own keys, so a key is read once for each query that names it. An index takes 8 bytes.
    Workspace: as for absorbed.
    """
    d = dims
    multiply_adds = d.B * d.N * d.Sq * (d.expanding + topk * (d.matched + d.L + d.R))
    gathered = d.B * d.Sq * topk * (d.L + d.Lk + d.R)
    workspace = 2 * d.B * d.Sq * d.N * (d.matched + d.L)
    cost = cost_of(multiply_adds, d.weights + gathered + d.query + d.output + workspace, element_size)
    return Cost(cost.flops, cost.bytes + 8 * d.B * d.Sq * topk)
