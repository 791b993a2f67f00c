"""Find latents that are kept in FP8 or INT8, in a tensor of all keys: attention to some keys can read them there.

    latent[b, j] = numbers[b, j] * scales[b, j]        a buffer, or a cache that grows; scales for groups of columns

Attention to all keys takes what Inductor dequantises in a loop: it reads them all anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mla_compile.fp8 import FP8

from ..algebra.terms import Dim, Read, Term
from ..code.reading import Reader
from ..mla.site import Site
from ..trace.coded import dtype_of, groups_of, numbers_of
from .scales import read_scales


@dataclass(frozen=True)
class CodedKeys:
    """Keys in e4m3fn or int8, with their scales.

    `latent` runs over the site's batch, keys and rank; `rope`, in the same dtype or the queries', over batch, keys and
    its columns. `scales` of what is coded run over `groups`, the slowest axes of the rank, and over batch and keys
    unless these share them; `factor` is one more number to multiply by. `layout` is batch and keys.
    """

    otherwise: ClassVar[str] = ""
    in_pages: ClassVar[bool] = False
    may_be_cast: ClassVar[bool] = True

    latent: Read
    rope: Read | None
    layout: tuple[Dim, Dim]
    scales: Read | None
    groups: Dim
    factor: float

    @property
    def coded(self) -> torch.dtype:
        """The dtype of the latents."""
        dtype: torch.dtype = dtype_of(self.latent)
        return dtype

    @property
    def words(self) -> str:
        """How attention reads the keys, for a report."""
        return f"reads keys in {'FP8' if self.coded == FP8 else 'INT8'}"

    @property
    def reads(self) -> tuple[Read, ...]:
        """What attention reads for its keys."""
        return tuple(read for read in (self.latent, self.rope, self.scales) if read is not None)

    @property
    def ropes(self) -> tuple[Read, ...]:
        """The rope key, if there is one."""
        return () if self.rope is None else (self.rope,)

    def read_latent(self, read: Reader, site: Site) -> Tensor:
        """`[B, T, L]`."""
        return read(self.latent, *self.layout, site.rank)

    def read_scales(self, read: Reader, latent: Tensor) -> Tensor | None:
        """The scales of all keys."""
        return read_scales(read, latent, self.scales, self.factor, self.layout, self.groups)

    def read_table(self, read: Reader, site: Site, latent: Tensor, *, whole: bool) -> Tensor | None:
        """None: there are no pages."""
        return None


def find_coded_keys(site: Site) -> CodedKeys | None:
    """A site's keys in FP8 or INT8; None if they are not provably numbers and scales that one kernel can read."""
    if len(site.ropes) > 1:
        return None
    latent = _keys_of(site, site.latent, site.rank)
    rope = _keys_of(site, site.ropes[0].key, site.ropes[0].summed) if site.ropes else None
    if latent is None or not site.ropes:
        return latent
    if rope is None:
        return replace(latent, rope=site.ropes[0].key.read)
    same = (rope.scales, rope.factor, rope.coded) == (latent.scales, latent.factor, latent.coded)
    alike = not latent.groups and same
    return replace(latent, rope=rope.latent) if alike else None


def _keys_of(site: Site, term: Term, columns: Dim) -> CodedKeys | None:
    numbers, tokens = numbers_of(term), (site.batch, site.attention.keys)
    if numbers is None:
        return None
    groups = () if numbers.by is None else groups_of(numbers.by, columns, tokens)
    known = numbers.by is None or dtype_of(numbers.by) in (torch.float32, torch.bfloat16, torch.float16)
    if groups is None or not known:
        return None
    return CodedKeys(numbers.of, None, tokens, numbers.by, groups, numbers.factor)
