"""Put the summands of scores together that are joined of parts, where parts of the keys have masks of their own.

s = q k^T;  s[..., n:] += bias                     s + cat(0, bias)
cat(s[..., :n].masked_fill(a, -inf), s[..., n:])   s.masked_fill(cat(a, False), -inf)

Only the last keys are those of the present tokens, say, and only these need a causal mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ..algebra import joins
from ..algebra.factored import factored
from ..algebra.made import padded
from ..algebra.operations import read_of
from ..algebra.sizes import Size, Unaligned, same, total
from ..algebra.terms import Axis, Form, Product, Term, Unread
from ..trace.trace import Trace
from .summands import Mask, Summand


def side_by_side(
    parts: Sequence[Sequence[Summand]], sizes: Sequence[Size], labels: tuple[int, ...], key: int, trace: Trace
) -> list[Summand]:
    """The summands of scores whose keys, dimension `key` of `labels`, are those of several parts; empty if the parts
    are not of the same products.

    `parts` are the summands of each of them, and `sizes` how many keys it has.
    """
    products = [[summand for summand in part if isinstance(summand.what, float)] for part in parts]
    if not products[0] or any(len(each) != len(products[0]) for each in products):
        return []
    whole = [_one_product(each, sizes, labels, key, trace) for each in zip(*products, strict=True)]
    known = [product for product in whole if product is not None]
    if len(known) < len(whole):
        return []
    masks = [[summand for summand in part if isinstance(summand.what, Mask)] for part in parts]
    if any(isinstance(mask.form.term.read.source, Unread) for part in masks for mask in part):
        return []
    common = _common(masks, sizes, key, trace)
    found = [
        _with_all_keys(mask, sizes[k], (total(sizes[:k]), total(sizes[k + 1 :])), key)
        for k, part in enumerate(masks)
        for mask in part[len(common) :]
    ]
    return [*known, *common, *found]


def _one_product(
    parts: Sequence[Summand], sizes: Sequence[Size], labels: tuple[int, ...], key: int, trace: Trace
) -> Summand | None:
    """The product of which these are the parts, in their order; None if they are of several that have no factor in
    common."""
    first, *others = parts
    if any(part.factors or part.added or part.labels != labels for part in parts):
        return None
    place = labels.index(key)
    if any(other.what != first.what for other in others) or not _fit(parts, sizes, place):
        return None
    whole = _of_one_tensor(parts, place, trace) or _joined(parts, place)
    return replace(first, form=whole) if whole is not None and isinstance(whole.term.parts, Product) else None


def _of_one_tensor(parts: Sequence[Summand], place: int, trace: Trace) -> Form | None:
    """The part of one tensor, perhaps all of it, that these parts are, side by side along dimension `place`; None if
    they are not."""
    form = _joined([replace(part, form=replace(part.form, term=Term(part.form.term.read))) for part in parts], place)
    if form is None or not isinstance(form.term.read.source, fx.Node):
        return None
    read = form.term.read
    term = trace.at(replace(read, then=()))
    product = term.parts
    if isinstance(product, Product):
        product = replace(product, scale=product.scale * math.prod(read.factors))
    return replace(form, term=replace(term, read=read, parts=product))


def _joined(parts: Sequence[Summand], place: int) -> Form | None:
    """The forms of summands joined along dimension `place`; None if their sizes do not factor alike."""
    try:
        form = joins.join(Unread(parts[0].form.term.read.source), [part.form for part in parts], place)
    except Unaligned:
        return None
    return replace(form, term=factored(form.term))


def _common(masks: Sequence[Sequence[Summand]], sizes: Sequence[Size], key: int, trace: Trace) -> list[Summand]:
    """The first masks of all parts, as far as those of each are parts of one mask over all keys."""
    found = list[Summand]()
    for parts in zip(*masks, strict=False):
        whole = _one_mask(parts, sizes, key, trace)
        if whole is None:
            break
        found.append(whole)
    return found


def _one_mask(parts: Sequence[Summand], sizes: Sequence[Size], key: int, trace: Trace) -> Summand | None:
    """The mask of which these are the parts, in their order; None if they are of several."""
    first = parts[0]
    alike = all(part.labels == first.labels and _settings(part) == _settings(first) for part in parts)
    if not alike or key not in first.labels:
        return None
    place = first.labels.index(key)
    form = _of_one_tensor(parts, place, trace) if _fit(parts, sizes, place) else None
    if form is None:
        return None
    assert isinstance(first.what, Mask)
    return replace(first, form=form, what=replace(first.what, term=form.term))


def _fit(parts: Sequence[Summand], sizes: Sequence[Size], place: int) -> bool:
    """Whether these have a key each for all of their part's, along dimension `place`, and are otherwise of one shape:
    none of them is broadcast where another one is not."""
    shapes = [part.form.shape for part in parts]
    others = [(*shape[:place], *shape[place + 1 :]) for shape in shapes]
    of_keys = all(same(shape[place], size) for shape, size in zip(shapes, sizes, strict=True))
    return of_keys and all(same(a, b) for other in others for a, b in zip(other, others[0], strict=True))


def _settings(summand: Summand) -> Mask:
    """A mask but for its tensor."""
    assert isinstance(summand.what, Mask)
    return replace(summand.what, term=Term(read_of(None, ()).read))


def _with_all_keys(summand: Summand, size: Size, between: tuple[Size, Size], key: int) -> Summand:
    """A mask of `size` keys as one of all keys that leaves those before and behind these as they are."""
    form, labels, mask = summand.form, summand.labels, summand.what
    assert isinstance(mask, Mask)
    if key not in labels:
        form, labels = replace(form, dims=(*form.dims, ())), (*labels, key)
    place = labels.index(key)
    own = form.dims[place] or (() if same(size, 1) else (Axis(size),))
    axis = Axis(total([size, *between]))
    read = padded(form.term.read, own, between, not mask.inverted if mask.attends else 0.0, axis)
    whole = Form((*form.dims[:place], (axis,), *form.dims[place + 1 :]), Term(read))
    return Summand(whole, labels, replace(mask, term=whole.term))
