"""Find latents and rope keys that are read from pages, so that attention can read them there.

    latent[b, j] = pages[table[b, j // page_size], j % page_size, :L]        pages laid one behind the other
    latent[b, j] = pages[table[b, j], :L]                                    slots: pages of one token
    latent[b, j] = pages[...] * scales[...]                                  FP8, INT8, INT4: scales for groups

The keys are the first of those that the table names. The pages of the rope key may be other columns of the same pool or
a pool of their own, but the table is the same. So it is with those of the scales, unless all tokens share one scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_compile.coded import CODED, HELD
from mla_compile.int4 import INT4

from ..algebra.gathers import lookup_of, together
from ..algebra.sizes import product, same
from ..algebra.substitution import change_read
from ..algebra.terms import Axis, Dim, Lookup, Read, Term, factors_in
from ..code.reading import Reader
from ..mla.site import Site
from ..trace.coded import dtype_of, groups_of, is_coded_lookup
from .scales import read_scales


@dataclass(frozen=True)
class Pages:
    """Key j of a sequence is in row `j % row.size` of the page that entry `j // row.size` of its table names.

    `latent` runs over `entry, row` and the site's rank, `rope` over `entry, row` and the rope's columns; `table` over
    the site's batch and `page`. `row` is None where a page is one token, `rope` where there is no rope key. `wraps`: a
    negative number in the table counts from the end. `scales` of what is coded run over `groups`, the slowest axes of
    the rank, and over `entry, row` unless all tokens share them; `factor` is one more number to multiply by, None where
    nothing is coded. In INT4 the fastest axis of the rank counts the two numbers of a byte.
    """

    words: ClassVar[str] = "reads the pages"
    otherwise: ClassVar[str] = "what the pages hold is gathered first"
    in_pages: ClassVar[bool] = True
    may_be_cast: ClassVar[bool] = False

    latent: Read
    rope: Read | None
    table: Read
    entry: Axis
    page: Axis
    row: Axis | None
    wraps: bool
    scales: Read | None = None
    groups: Dim = ()
    factor: float | None = None

    @property
    def reads(self) -> tuple[Read, ...]:
        """What attention over the pages reads for its keys."""
        reads = self.latent, self.rope, self.scales, self.table
        return tuple(read for read in reads if read is not None)

    @property
    def layout(self) -> tuple[Dim, Dim]:
        """The pool's first dimensions: pages and rows."""
        return (self.entry,), () if self.row is None else (self.row,)

    @property
    def ropes(self) -> tuple[Read, ...]:
        """The rope key, if there is one."""
        return () if self.rope is None else (self.rope,)

    @property
    def coded(self) -> torch.dtype | None:
        """The dtype of a pool with scales."""
        return None if self.factor is None else HELD[CODED.index(dtype_of(self.latent))]

    def read_latent(self, read: Reader, site: Site) -> Tensor:
        """`[pages, page_size, L]`; in INT4 the bytes, `[pages, page_size, L / 2]`."""
        if dtype_of(self.latent) != INT4:
            tensor: Tensor = read(self.latent, *self.layout, site.rank)
            return tensor
        *others, last = self.latent.dims
        return read(Read(self.latent.source, (*others, last[:-1])), *self.layout, site.rank[:-1])

    def read_scales(self, read: Reader, latent: Tensor) -> Tensor | None:
        """The scales of a pool that has some."""
        return (
            None
            if self.factor is None
            else read_scales(read, latent, self.scales, self.factor, self.layout, self.groups)
        )

    def read_table(self, read: Reader, site: Site, latent: Tensor, *, whole: bool) -> Tensor | None:
        """`[B, max_pages]`, or, if not `whole`, with only as many entries as T keys take."""
        table: Tensor = read(self.table, site.batch, (self.page,))
        if self.wraps:  # a naive read counts negative pages from the end
            table = torch.where(table < 0, table + latent.shape[0], table)
        keys = site.sizes["T"]
        if whole or same(product([self.page.size, 1 if self.row is None else self.row.size]), keys):
            return table
        # An index rather than a slice, which would put a guard on its size.
        count: Any = read.realize(keys)
        count = (count + latent.shape[1] - 1) // latent.shape[1]
        return table.index_select(1, torch.arange(count, device=table.device))


def find_pages(site: Site) -> Pages | None:
    """The pages of a site; None if its keys are not provably read from pages in a way that one kernel can."""
    if len(site.ropes) > 1:
        return None
    latent = _pages_of(site, site.latent, site.rank)
    rope = _pages_of(site, site.ropes[0].key, site.ropes[0].summed) if site.ropes else None
    if latent is None or not site.ropes:
        return None if latent is None else latent[1]
    return None if rope is None else _with_rope(*latent, *rope)


def _pages_of(site: Site, term: Term, columns: Dim) -> tuple[Lookup, Pages] | None:
    """A term as a lookup, and the pages that it looks up; None if it is no lookup of pages by the site's keys."""
    lookup = lookup_of(term)
    if lookup is None:
        return None
    coded = is_coded_lookup(lookup)
    if not coded and (lookup.then or lookup.scales is not None or dtype_of(lookup.pages) in CODED):
        return None
    pages, table, keys = lookup.pages.axes, lookup.table.axes, site.attention.keys
    if lookup.flat is not None and keys == (lookup.flat.keys,):
        page, row = lookup.flat.page, lookup.flat.row
    elif lookup.flat is None and len(keys) == 2:
        page, row = keys
    elif lookup.flat is None and len(keys) == 1:
        page, row = keys[0], None
    else:
        return None
    one_pool = page in table and page not in pages and (row is None or row in pages)
    if not one_pool or pages & set(site.batch) or not table <= {*site.batch, page} or lookup.entry not in pages:
        return None
    if dtype_of(lookup.pages) == INT4 and not _in_whole_bytes(site, lookup.pages, columns):
        return None
    found = Pages(lookup.pages, None, lookup.table, lookup.entry, page, row, lookup.wraps)
    scaled = _scaled(found, lookup, columns) if coded else found
    return None if scaled is None else (lookup, scaled)


def _in_whole_bytes(site: Site, pages: Read, columns: Dim) -> bool:
    """Whether the latents of a site, for keys and values alike, are all numbers of some bytes, in the bytes' order."""
    half = pages.dims[-1][-1]
    together = columns is site.rank and site.of_keys is None and not site.apart
    return together and half.whole and same(half.extent, 2) and half.axis is columns[-1]


def _scaled(pages: Pages, lookup: Lookup, columns: Dim) -> Pages | None:
    """Coded pages, if scales run over equal groups of the columns and, where each token has its own, are float32."""
    scales, factor = lookup.scales, math.prod(factors_in(lookup.then))
    if scales is None:
        return replace(pages, factor=factor)
    tokens = (pages.entry,) if pages.row is None else (pages.entry, pages.row)
    groups, each = groups_of(scales, columns, [tokens]), not scales.axes.isdisjoint(tokens)
    known = (torch.float32,) if each else (torch.float32, torch.bfloat16, torch.float16)  # never cast the whole pool
    if groups is None or dtype_of(scales) not in known or (each and factor != 1.0):
        return None
    return replace(pages, scales=scales, groups=groups, factor=factor)


def _with_rope(latent_lookup: Lookup, latent: Pages, rope_lookup: Lookup, rope: Pages) -> Pages | None:
    """Both in one, if the rope keys are in the same rows of the same entries of one table, under the same scales."""
    changes = together(latent_lookup, rope_lookup)
    if changes is None:
        return None
    own = None if rope.scales is None else change_read(rope.scales, changes)
    alike = (own, rope.factor, rope.coded) == (latent.scales, latent.factor, latent.coded)
    if rope.factor is not None and (latent.groups or not alike):
        return None
    return replace(latent, rope=change_read(rope.latent, changes))
