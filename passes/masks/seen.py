"""Turn what the masks of a site mean back into torch code: a mask and a causal offset, lengths, or indices of keys.

Like `materialize`, these functions run on fake tensors while `rewrite` traces them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, reduce
from typing import Any

import sympy
import torch
from torch import Tensor

from ..algebra.sizes import Size
from ..algebra.terms import Axis, Dim, Read
from ..attention.scores import Mask
from ..code.reading import Reader, Realize, symbols_of
from ..mla.site import Site
from .bounds import Bounds, bounds_of, emit_bounds
from .meaning import Meaning
from .positions import Affine, Element, Named


class Seen:
    """The keys that each query of a site attends to."""

    def __init__(self, site: Site, meaning: Meaning) -> None:
        self.site, self.meaning = site, meaning

    @property
    def named(self) -> Named | None:
        """The indices that name every query's keys, if there are such for all heads alike."""
        meaning = self.meaning
        if len(meaning.named) != 1 or meaning.named[0].inverted or meaning.tensors:
            return None
        if any(read.axes & set(self.site.heads) for read in self.reads("sparse")):
            return None
        return meaning.named[0]

    @cached_property
    def bounds(self) -> Bounds | None:
        """All that the masks say as numbers of keys, if that is what they say."""
        return bounds_of(self.site, self.meaning)

    @property
    def _tensors(self) -> tuple[Mask, ...]:
        """The masks that a mask over all keys is made of besides the elements.

        Where more than a causal limit and elements is known, all of them: they are in the graph once for all layers.
        """
        meaning = self.meaning
        whole = meaning.limits or meaning.named or meaning.uniform_when_empty
        return self.site.attention.masks if whole else meaning.tensors

    @property
    def _elements(self) -> tuple[Element, ...]:
        return () if self._tensors == self.site.attention.masks else self.meaning.elements

    @property
    def _offset(self) -> Size | None:
        return self.meaning.causal_offset if not self.meaning.uniform_when_empty else None

    def reads(self, path: str) -> list[Read]:
        """What the path reads for this; that of keys in pages is called `paged`."""
        if path == "paged" and self.bounds is not None:
            return self.bounds.reads
        if path != "sparse":
            return [mask.term.read for mask in self._tensors] + [element.read for element in self._elements]
        meaning = self.meaning
        limited = [what for limit in meaning.limits for what, _ in limit.what.terms if isinstance(what, Read)]
        return [*limited, *(e.read for e in meaning.elements), *(n.indices for n in meaning.named)]

    def said(self, path: str) -> tuple[object, ...]:
        """All that the code of the path depends on."""
        if path == "sparse":
            return (replace(self.meaning, words=""), self.may_be_empty(path))
        if path == "paged" and self.bounds is not None:
            return (self.bounds, self.may_be_empty(path))
        masks = [(m.term.read, m.attends, m.factor, m.fill, m.inverted) for m in self._tensors]
        return (masks, self._elements, self._offset, self.may_be_empty(path))

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The symbols in sizes that are no tensor's."""
        sizes = [limit.what.const for limit in self.meaning.limits] + [self.meaning.causal_offset or 0]
        return set[sympy.Symbol]().union(
            *(sympy.sympify(size).free_symbols for size in sizes), *(symbols_of(n.indices) for n in self.meaning.named)
        )

    def may_be_empty(self, path: str) -> bool:
        """Whether a query may see no key, as far as can be told."""
        if path == "sparse":
            return not self.meaning.uniform_when_empty
        if path == "paged" and self.bounds is not None:
            return self.bounds.may_be_empty
        offset = self._offset
        from_zero = offset is None or bool(sympy.sympify(offset).is_nonnegative)
        return bool(self._tensors or self._elements) or not from_zero

    def mask(self, read: Reader) -> tuple[Tensor | None, int | torch.SymInt | None]:
        """A mask `[B|1, N|1, Sq|1, T|1]`, bool if all just reject, else a number to add; and a causal offset."""
        site = self.site
        layout = (site.batch, site.heads, site.tokens, site.attention.keys)
        offset = None if self._offset is None else read.realize(self._offset)
        masks = [(mask, read(mask.term.read, *layout, broadcast=False)) for mask in self._tensors]
        allowed = [_element(element, read, layout) for element in self._elements]
        allowed += [~tensor if mask.inverted else tensor for mask, tensor in masks if mask.attends]
        if all(mask.attends and math.isinf(mask.fill) for mask, _ in masks):
            return (reduce(torch.logical_and, allowed) if allowed else None), offset
        # In the order in which the user applied them: a number that takes a score's place also takes an earlier bias's.
        dtype = torch.promote_types(site.node.meta["val"].dtype, torch.float32)
        added = masks[0][1].new_zeros((1, 1, 1, 1), dtype=dtype)
        for mask, tensor in masks:
            if mask.attends:
                added = torch.where(~tensor if mask.inverted else tensor, added, mask.fill)
            else:
                added = added + (tensor.to(dtype) * mask.factor if mask.factor != 1.0 else tensor.to(dtype))
        for element in self._elements:
            added = torch.where(_element(element, read, layout), added, -math.inf)
        return added, offset

    def in_pages(self, read: Reader, like: Tensor) -> tuple[Tensor | None, bool, Tensor, Tensor | None]:
        """A mask, if it takes one; whether there is a causal limit; lengths, and positions of the first queries if
        those are not the last ones: `[B]`, int64, on the device of `like`."""
        if self.bounds is not None:
            bounds, mask = self.bounds, None
        else:
            mask, _ = self.mask(read)
            bounds = Bounds((), () if self._offset is None else (Affine(self._offset),))
        lengths, positions = emit_bounds(bounds, self.site, read, like)
        return mask, bool(bounds.positions), lengths, positions

    def indices(self, read: Reader) -> tuple[Tensor, int | torch.SymInt | None]:
        """The keys that each query attends to, `[B, Sq, topk]`, -1 for none; and a causal offset that holds besides."""
        site, named = self.site, self.named
        assert named is not None
        indices = read(named.indices, site.batch, site.tokens, (named.named,))
        if not named.distinct:
            indices = indices.sort(dim=-1).values
            again = indices[..., 1:] == indices[..., :-1]
            indices = torch.cat([indices[..., :1], indices[..., 1:].masked_fill(again, -1)], dim=-1)
        key = indices.clamp_min(0)

        def at_keys(what: Read) -> Tensor:
            """`[B|1, Sq|1, topk|1]`"""
            layout = (site.batch, site.tokens, site.attention.keys)
            tensor = read(what, *layout, broadcast=False)
            if site.attention.keys[0] not in what.axes:
                return tensor
            return tensor.expand(*key.shape[:2], -1).gather(2, key.long())

        hidden = [self._position(limit.what, key, at_keys, read.realize) > 0 for limit in self.meaning.limits]
        hidden += [at_keys(e.read) if e.inverted else ~at_keys(e.read) for e in self.meaning.elements]
        if hidden:
            indices = indices.masked_fill(reduce(torch.logical_or, hidden), -1)
        offset = self.meaning.causal_offset
        return indices, None if offset is None else read.realize(offset)

    def slots(self, read: Reader, table: Tensor, rows: Any) -> Tensor:
        """The rows of a pool that each query attends to, `[B, Sq, topk]`, -1 for none.

        `table` `[B, pages]` names the pages of a sequence, of `rows` rows each.
        """
        indices, offset = self.indices(read)
        if offset is not None:
            last = torch.arange(indices.shape[1], device=indices.device)[:, None].add(offset)
            indices = torch.where(indices > last, -1, indices)
        key = indices.clamp_min(0).long()
        page = table.long().gather(1, (key // rows).flatten(1)).view(key.shape)
        return torch.where(indices < 0, -1, page * rows + key % rows)

    def _position(self, what: Affine, key: Tensor, at_keys: Callable[[Read], Tensor], realize: Realize) -> Tensor:
        """The value of an inequality's left side at keys `[B, Sq, topk]`."""
        const: Any = realize(what.const)  # int or SymInt, as the size of an axis below
        position = torch.zeros_like(key, dtype=torch.int64) + const
        for term, factor in what.terms:
            if term is self.site.attention.keys[0]:
                value = key
            elif isinstance(term, Axis):
                size: Any = realize(term.size)
                value = torch.arange(size, device=key.device)[:, None]
            else:
                value = at_keys(term)
            position = position + factor * value
        return position


def _element(element: Element, read: Reader, layout: tuple[Dim, ...]) -> Tensor:
    tensor = read(element.read, *layout, broadcast=False)
    return ~tensor if element.inverted else tensor
