"""What the attention ops of a site take: queries, keys as they are stored, weights, and masks as a path takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ..algebra.made import addends
from ..algebra.sizes import Unaligned
from ..algebra.terms import Dim, Read
from ..caches.stored import StoredKeys
from ..code.reading import Reader
from ..masks.named_keys import NamedKeys
from ..mla.site import Piece, Site
from .adapters import is_made_of_matrices, times_sum, widened
from .carriers import Carrier, Indices, Lengths, MaskAndOffset
from .per_head import per_head


@dataclass(frozen=True)
class Operands:
    """The operands of one site, all in one dtype except what is coded.

    `q_nope [B, Sq, N, P]`, `q_rope [B, Sq, N, R]`; `latent` and `k_rope` over `keys.layout`, L and R, the latter with
    heads before R if it differs between them. A second latent, that of the keys, comes before the first.
    """

    site: Site
    keys: StoredKeys
    carrier: Carrier
    read: Reader
    q_nope: Tensor
    q_rope: Tensor
    latent: Tensor
    k_rope: Tensor
    scales: Tensor | None
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        """The scale of the scores."""
        return largest_scale((self.site.nope, *self.site.ropes))

    def weights(self) -> tuple[Tensor | None, Tensor | None]:
        """`W_UK [N, P, L]` and `W_UV [N, V, L]`, None where absorbed by hand."""
        site, read = self.site, self.read
        rank = site.rank if site.second_latent is None else site.second_latent.rank
        w_uk, w_uv = (
            None if weight is None else read(weight, site.heads, dim, inner).to(self.dtype)
            for weight, dim, inner in (
                (site.w_uk, site.nope.summed, rank),
                (site.w_uv, site.attention.columns, site.rank),
            )
        )
        return w_uk, w_uv

    def q_latent(self, w_uk: Tensor | None) -> Tensor:
        """`[B, Sq, N, L]`: the queries in latent space; 0 where the keys have another latent than the values."""
        site = self.site
        if site.apart:
            return self.q_rope.new_zeros([*self.q_rope.shape[:3], self.latent.shape[-1]])
        if w_uk is None or site.w_uk is None:
            return self.q_nope
        return self._times(self.q_nope, w_uk, site.w_uk, site.nope.summed, site.rank)

    def up_projected(self, o: Tensor, w_uv: Tensor | None) -> Tensor:
        """`[B, Sq, N, V]` from sums of latents `[B, Sq, N, L]`."""
        site = self.site
        if w_uv is None or site.w_uv is None:
            return o
        return self._times(o, w_uv.transpose(1, 2), site.w_uv, site.rank, site.attention.columns)

    def _times(self, x: Tensor, weight: Tensor, read: Read, inner: Dim, outer: Dim) -> Tensor:
        if is_made_of_matrices(read, inner, outer):
            return times_sum(x, addends(read), self.site.heads, inner, outer, self.read)
        return per_head(x, weight, read)

    def to_expand(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """A wider latent, `W_UK` and `W_UV` for an op that up-projects keys that are not in pages, if the weights have
        adapters; else None."""
        site = self.site
        if site.w_uk is None or site.w_uv is None or site.second_latent is not None:
            return None
        return widened(self.latent, site.w_uk, site.w_uv, site, self.read)

    def mask(self) -> tuple[Tensor | None, int | torch.SymInt | None]:
        """A mask and a causal offset, for keys that are not in pages."""
        assert isinstance(self.carrier, MaskAndOffset)
        return self.carrier.emit(self.read)

    def table(self, *, whole: bool = True) -> Tensor:
        """`[B, max_pages]`, or with no more entries than the keys need if not `whole`."""
        table = self.keys.read_table(self.read, self.site, self.latent, whole=whole)
        assert table is not None
        return table

    def lengths(self, table: Tensor) -> tuple[Tensor | None, bool, Tensor, Tensor | None]:
        """What hides keys in pages: see `Lengths`."""
        assert isinstance(self.carrier, Lengths)
        return self.carrier.emit(self.read, table)

    def named(self) -> NamedKeys:
        """What names keys one by one."""
        assert isinstance(self.carrier, Indices)
        return self.carrier.told


def operands_of(site: Site, keys: StoredKeys, carrier: Carrier, read: Reader) -> Operands:
    """The operands of a site.

    Raises:
        Unaligned: if keys that may not be cast are in another dtype than the queries.
    """
    rows = site.batch, site.tokens, site.heads
    pieces = site.nope, *site.ropes
    queries = (read(piece.query.read, *rows, piece.summed) for piece in pieces)
    q_nope, *q_ropes = scaled_alike(pieces, queries)
    q_rope = _joined(q_ropes, q_nope, q_nope.dtype)
    latent = keys.read_latent(read, site)
    if (second := site.second_latent) is not None:
        of_keys = read(second.latent.read, *keys.layout, second.rank)
        wide = torch.promote_types(of_keys.dtype, latent.dtype)
        latent = torch.cat([of_keys.to(wide), latent.to(wide)], dim=-1)
    scales = keys.read_scales(read, latent)
    layout = (*keys.layout, *([site.heads] if any(map(site.differs, site.ropes)) else []))
    k_ropes = [read(rope, *layout, piece.summed) for rope, piece in zip(keys.ropes, site.ropes, strict=True)]
    k_rope = _joined(k_ropes, latent, latent.dtype if keys.coded is None else q_nope.dtype)

    tensors = q_nope, q_rope, latent, k_rope
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors if keys.coded is None or t.dtype != keys.coded))
    if not keys.may_be_cast and any(t.dtype not in (dtype, keys.coded) for t in (latent, k_rope)):
        raise Unaligned(f"{dtype} queries meet pages of {latent.dtype} and {k_rope.dtype}")
    q_nope, q_rope, latent, k_rope = (t if t.dtype == keys.coded else t.to(dtype) for t in tensors)
    return Operands(site, keys, carrier, read, q_nope, q_rope, latent, k_rope, scales, dtype)


def largest_scale(pieces: Sequence[Piece]) -> float:
    """The scale of greatest magnitude: queries are multiplied down to it, as float16 might not hold them otherwise."""
    return max((piece.scale for piece in pieces), key=abs)


def scaled_alike(pieces: Sequence[Piece], queries: Iterable[Tensor]) -> Iterator[Tensor]:
    """The queries of pieces, each times its piece's scale over the largest one."""
    largest = largest_scale(pieces)
    for piece, query in zip(pieces, queries, strict=True):
        yield query if piece.scale == largest else query * (piece.scale / largest)


def _joined(parts: list[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
    """The parts side by side; a tensor without columns if there are none."""
    if not parts:
        return like.new_empty([*like.shape[:-1], 0], dtype=dtype)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
