"""What paths that are one attention op of ours have in common.

Before   k = cat(latent @ W_UK, k_rope), v = latent @ W_UV, o = softmax(q k^T) v
After    o, lse = the path's op, of queries, keys as they are stored, weights, and masks in a form that it takes
         o times the scale of v, + biases, times the share that sinks leave
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import symbols_in
from ..caches.stored import StoredKeys
from ..code.reading import Reader, sources_of, write_as
from ..masks.meaning import Meaning
from ..mla.site import Site
from .carriers import Carrier
from .exchange import Exchange, Op
from .operands import Operands, operands_of
from .padding import padded
from .path import Part, Path


class OneOp(Path):
    """A path with an op that gives the output and the log-sum-exp of the scores."""

    @abstractmethod
    def op(self, keys: StoredKeys) -> str:
        """The mla op that attends to keys that are stored so."""

    @abstractmethod
    def attend(self, op: Op, x: Operands, workspace_tokens: int) -> tuple[Tensor, Tensor]:
        """`o [B, Sq, N, V]` and `lse [B, Sq, N]`, by the op of the keys."""

    def prepared(self, x: Operands) -> Operands:
        """The operands as the op is to take them."""
        return x

    def can_read(self, keys: StoredKeys, site: Site, meaning: Meaning) -> bool:
        """Keys in pages, and keys that are not coded."""
        return keys.in_pages or keys.coded is None

    def exchanges(self, *, of_latents: bool) -> bool:
        """Whether ranks may attend to parts of the keys and exchange outputs; `of_latents`: as sums of latents."""
        return False

    def parts(self, site: Site, keys: StoredKeys, mask: Carrier | None, workspace_tokens: int) -> list[Part]:
        """All in the place of the attention."""
        assert mask is not None
        return [Part(site.node, OneOpCode(self, site, keys, mask, workspace_tokens))]


class OneOpCode:
    """The torch code of a rewritten site, as a function of the tensors that it reads."""

    def __init__(
        self,
        path: OneOp,
        site: Site,
        keys: StoredKeys,
        carrier: Carrier,
        workspace_tokens: int,
        exchange: Exchange | None = None,
    ) -> None:
        self.path, self.site, self.keys, self.carrier = path, site, keys, carrier
        self.workspace_tokens, self.exchange = workspace_tokens, exchange
        reads = [*keys.reads, site.w_uk, site.w_uv, site.nope.query.read, *site.biases]
        reads += [rope.query.read for rope in site.ropes]
        reads += [site.second_latent.latent.read] if site.second_latent is not None else []
        reads += [read for shift in site.shifts for read in shift.reads]
        reads += carrier.reads
        reads += [sink.term.read for sink in site.attention.sinks]
        symbols = symbols_in(site.sizes["T"], site.sizes["Sq"]) if keys.in_pages else set[sympy.Symbol]()
        self.sources = sources_of(reads, site.node, site.attention.dims, carrier.symbols | symbols)

    @property
    def said(self) -> object:
        """The path, the keys, the masks, and what ranks exchange."""
        return self.path.name, self.keys, self.carrier.said, self.exchange

    def __call__(self, *values: Any) -> Tensor:
        site, read = self.site, Reader(self.sources, values)
        op = getattr(torch.ops.mla, self.path.op(self.keys))
        own = site if self.exchange is None else self.exchange.operands(site)
        attend = self.path.attend if self.exchange is None else self.exchange.around(self.path.attend)
        o, lse = attend(op, self.path.prepared(operands_of(own, self.keys, self.carrier, read)), self.workspace_tokens)
        return finished(site, self.carrier, read, o, lse)


def finished(site: Site, carrier: Carrier, read: Reader, o: Tensor, lse: Tensor) -> Tensor:
    """What takes the place of an attention, made of its output `[B, Sq, N, V]` and the log-sum-exp of its scores.

    It is scaled as the values are, their biases are added, sinks take their share, and rows that see nothing become
    what they are in the graph.
    """
    rows, columns = (site.batch, site.tokens, site.heads), site.attention.columns
    empty = lse.isneginf().unsqueeze(-1) if carrier.may_be_empty else None
    o = o if site.value_scale == 1.0 else o * site.value_scale
    for bias in site.biases:
        addend = read(bias, *rows, columns)
        o = o + (addend if empty is None else torch.where(empty, 0, addend))
    o, columns = padded(o, site, read.realize)
    if site.attention.shared:
        o = _share(site, read, o, lse)
    if site.attention.strict_rows and empty is not None:
        o = torch.where(empty, math.nan, o)
    if site.attention.numbers:
        o = torch.where(_are_numbers(site, read, lse), o, 0)
    output = write_as(o, (*rows, columns), site.attention.dims, read.realize)
    return output.to(site.node.meta["val"].dtype)


def _share(site: Site, read: Reader, o: Tensor, lse: Tensor) -> Tensor:
    """The output where sinks take part in the softmax: `o exp(lse) / (exp(lse) + exp(sinks))`.

    NaN where nothing takes part at all, keys or sinks, as in a plain softmax.
    """
    rows = site.batch, site.tokens, site.heads
    taken = _taken(site, read, lse)
    assert taken is not None
    for shift in site.shifts:
        q, k = (read(what, *rows, shift.summed).to(lse.dtype) for what in shift.reads)
        lse = lse + (q * k).sum(-1) * shift.scale
    return o * torch.sigmoid(lse - taken).unsqueeze(-1).to(o.dtype)


def _taken(site: Site, read: Reader, lse: Tensor) -> Tensor | None:
    """The log-sum-exp of the scores of sinks, `[B, Sq, N]` or one for all; None where there are none."""
    dtype = lse.dtype
    taken = lse.new_full((), site.attention.share) if site.attention.share > -math.inf else None
    for sink in site.attention.sinks:
        scores = read(sink.term.read, site.batch, site.tokens, site.heads, sink.keys).to(dtype) * sink.factor
        taken = scores.logsumexp(-1) if taken is None else torch.logaddexp(taken, scores.logsumexp(-1))
    return taken


def _are_numbers(site: Site, read: Reader, lse: Tensor) -> Tensor:
    """`[B, Sq, N, 1]`: whether the softmax of the scores is a number: none of them is NaN or inf, and some are seen."""
    taken = _taken(site, read, lse)
    total = lse if taken is None else torch.logaddexp(lse, taken)
    return total.isfinite().unsqueeze(-1)
