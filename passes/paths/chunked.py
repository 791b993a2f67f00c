"""Chunked: keys and values of every head, a workspace at a time.

o = expanded_attention(q, latent, k_rope, W_UK, W_UV)
o = paged_expanded_attention(q, pages, block_table, W_UK, W_UV), for keys in pages

Heads may have rope keys of their own, which are then not in pages.
"""

from __future__ import annotations

from typing import ClassVar

import sympy
import torch
from torch import Tensor

from mla_compile.cost import Cost, Dims, Named, attends_causally, cost_of

from ..algebra.sizes import known_at_most, product, total
from ..caches.stored import StoredKeys
from ..masks.meaning import Meaning
from ..mla.apart import up_projected_apart
from ..mla.own_ropes import in_keys
from ..mla.site import Site
from ..mla.why_not import name
from ..nodes.refusal import Refusal
from ..nodes.shapes import environment_of, hints_of
from .as_written import expanded_multiply_adds
from .carriers import Carrier, InSequences, Lengths, MaskAndOffset
from .exchange import Op
from .in_sequences import Blocks
from .one_op import OneOp
from .operands import Operands

_QUERIES = 2048
"""The most queries of a packed sequence for which keys are up-projected at a time. With DeepSeek-V3's dims, a key's
up-projection is then a fifth of what attending to it takes, and a short sequence is not padded to a very long one."""
FORCE = "set options={'mla.path': 'absorbed'}"
_NOT_MLA = "first see that it is MLA and not ordinary attention, which this would slow down, then "


class Chunked(OneOp):
    """One attention for each head, over up-projected chunks of the keys."""

    name = "chunked"
    why = "many queries meet many keys"
    carriers: ClassVar[tuple[type[Carrier], ...]] = (InSequences, Lengths, MaskAndOffset)
    may_branch = True
    expands = True

    def as_taken(self, site: Site) -> Site:
        """Rope keys of each head are columns of its keys, and keys that have a latent of their own come from that."""
        return in_keys(up_projected_apart(site))

    def takes(self, site: Site, meaning: Meaning) -> bool:
        """All sites with up-projections whose scores are a sum, though it refuses some of them."""
        return site.attention.opaque is None and site.up_projects_both

    def refuse(self, site: Site, *, asked: bool) -> None:
        """Refuse a latent that is not worth keeping, and keys that are neither up-projected from one latent nor shared
        by heads as they are."""
        if not _shared_as_written(site):
            refuse_apart(site)
        if not asked:
            refuse_wide_latent(site, may_be_asked=self.may_be_asked)

    def cost(self, dims: Dims, element_size: int, workspace_tokens: int, named: Named | None) -> Cost:
        """See `chunked_cost`."""
        return chunked_cost(dims, element_size, workspace_tokens, causal=attends_causally(named))

    def prefers_lengths(self, device: str) -> bool:
        """Always, for batches of unequal prompts: no chunk needs a mask, and sequences that end before a chunk do not
        attend to it.

        On CPU, where a mask's values are looked at, a sequence of 1,024 tokens and one of 700 take 1 to 6 % less time
        under lengths.
        """
        return True

    def exchanges(self, *, of_latents: bool) -> bool:
        """Only outputs after W_UV: it has no sums of latents."""
        return not of_latents

    def op(self, keys: StoredKeys) -> str:
        """One op for keys in pages, another for all others."""
        return "paged_expanded_attention" if keys.in_pages else "expanded_attention"

    def attend(self, op: Op, x: Operands, workspace_tokens: int) -> tuple[Tensor, Tensor]:
        """Attention to the keys and values that the op makes of the latents."""
        if isinstance(x.carrier, InSequences):
            w_uk, w_uv = _weights(x)
            blocks = Blocks.of(x, x.carrier.told, _QUERIES)
            q = blocks.split(_queries(x))
            part = op(
                *(q, x.latent, x.k_rope, blocks.table, blocks.lengths, w_uk, w_uv),
                *(blocks.causal, x.scale, workspace_tokens),
                mask=blocks.mask,
                first_positions=blocks.positions,
                query_lens=blocks.counts,
            )
            o, lse = blocks.joined(*part)
        elif x.keys.in_pages:
            w_uk, w_uv = _weights(x)
            q, table = _queries(x), x.table(whole=False)  # the op lays chunks over all of it
            mask, causal, lengths, positions = x.lengths(table)
            o, lse = op(
                *(q, x.latent, x.k_rope, table, lengths, w_uk, w_uv, causal, x.scale, workspace_tokens),
                latent_scales=x.scales,
                mask=mask,
                first_positions=positions,
            )
        else:
            mask, offset = x.mask()
            latent, w_uk, w_uv = x.to_expand() or (x.latent, *_weights(x))
            operands = _queries(x), latent, x.k_rope, w_uk, w_uv, mask, offset, x.scale, workspace_tokens
            o, lse = op(*operands)
        return o, lse


def refuse_apart(site: Site) -> None:
    """Refuse keys that are not up-projected from one latent, theirs or that of the values."""
    if site.apart:
        keys, values = (name(read) for read in (site.nope.key.read, site.latent.read))
        reason = (
            "expected keys that are up-projected from one latent for many queries, "
            f"found keys from {keys} and values from {values}"
        )
        raise Refusal(site.node, reason, "project both from the same tensor")


def _shared_as_written(site: Site) -> bool:
    """Whether heads share keys, and queries meet these as they do in the graph.

    If W_UK were absorbed into the queries instead, these would be wider than there.
    """
    if not site.apart:
        return False
    written = total(product(axis.size for axis in score.summed) for score in site.attention.scores)
    return known_at_most(site.sizes["R"], written)


def refuse_wide_latent(site: Site, *, may_be_asked: bool) -> None:
    """Refuse a latent at least half as wide as all that it expands to: as every key is expanded, nothing is saved.

    Keys and values that several heads share count once. Sizes that are symbols are taken as they are now: a graph that
    stays unchanged is right for all of them. If a path `may_be_asked` for, the refusal says how.
    """
    sizes = site.sizes
    width = total([sizes["L"], sizes.get("Lk", 0)])
    key_heads, value_heads = (product(axis.size for axis in heads) for heads in (site.key_heads, site.value_heads))
    expanded = total([product([key_heads, sizes["P"]]), product([value_heads, sizes["V"]])])
    hints = hints_of((width, expanded), environment_of(site.node))
    if (2 * sympy.sympify(width)).subs(hints) >= sympy.sympify(expanded).subs(hints):
        raise Refusal(
            site.node,
            "expected a latent less than half as wide as the keys and the values it expands to, found width "
            f"{width} for keys of {key_heads} x {sizes['P']} and values of {value_heads} x {sizes['V']}",
            _NOT_MLA + FORCE if may_be_asked else "make the latent narrower, if this is MLA and not ordinary attention",
        )


def _weights(x: Operands) -> tuple[Tensor, Tensor]:
    """`W_UK [N, P, L]` and `W_UV [N, V, L]`; P is 0 where heads share keys as they are."""
    w_uk, w_uv = x.weights()
    assert w_uv is not None
    return (w_uv[:, :0] if w_uk is None else w_uk), w_uv


def _queries(x: Operands) -> Tensor:
    """`[B, Sq, N, P + R]`"""
    if x.site.apart:
        return x.q_rope
    return torch.cat([x.q_nope, x.q_rope], dim=-1) if x.q_rope.shape[-1] else x.q_nope


def chunked_cost(dims: Dims, element_size: int, workspace_tokens: int, *, causal: bool = False) -> Cost:
    """Cost of expanding `workspace_tokens` tokens at a time, attending to them and merging the results.

    The multiply-adds are the naive code's. Each token's `[N, P]` keys and `[N, V]` values pass through the workspace;
    the rope key stays shared. Every chunk but the first reads weights and query again, writes an output of its own and
    merges it (two read, one written). There are `ceil(T / workspace_tokens)` chunks, counted as
    `1 + (T - 1) / workspace_tokens`, which is never less, equal at `k workspace_tokens + 1`, and a polynomial.
    """
    if workspace_tokens < 1:
        raise ValueError(f"workspace_tokens: expected at least 1, found {workspace_tokens}")
    d = dims
    workspace = 2 * d.B * d.T * d.N * (d.P + d.V)
    further_chunks = sympy.sympify(d.T - 1) / workspace_tokens
    elements = d.weights + d.latent_cache + d.query + d.output + workspace
    elements += further_chunks * (d.weights + d.query + 4 * d.output)
    return cost_of(expanded_multiply_adds(d, causal), elements, element_size)
