"""Tensors in FP8 (e4m3fn), INT8 or INT4 that a graph widens and multiplies by scales.

    node = lookup.to(dtype) * scales        a lookup, of pages with scales
    node = tensor.to(dtype) * scales        numbers and scales of all keys: a cache that is a buffer, or grows

The form of such a product is a leaf, whose term records this in `stored`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mla_compile.coded import CODED
from mla_compile.int4 import INT4, UINT4
from mla_compile.int8 import INT8

from ..algebra import operations
from ..algebra.gathers import lookup_of, scaled
from ..algebra.sizes import Unaligned
from ..algebra.terms import Bits, Dim, Form, Lookup, Numbers, Read, Term
from .handler import Forms
from .weights import factors

WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that hold every number of e4m3fn and of int8."""


def dequantized_read(trace: Forms, node: fx.Node) -> Form | None:
    """The form of a product, a leaf, if it is a tensor in FP8, INT8 or INT4 times its scales; else None."""
    operands, dtype = node.all_input_nodes, node.meta["val"].dtype
    if not any(is_coded(widened(trace[operand], operand, dtype).term) for operand in operands):
        return None
    try:
        whole, forms = factors(trace, node)
        forms = [widened(form, operand, dtype) for form, operand in zip(forms, operands, strict=True)]
        for form, factor in (forms, forms[::-1]) if len(forms) == 2 else ():
            stored = _scaled(form.term, factor.term)
            if stored is not None and (isinstance(stored, Lookup) or _may_be_cached(whole)):
                return replace(whole, term=replace(whole.term, stored=stored))
    except Unaligned:
        pass
    return None


def _scaled(term: Term, factor: Term) -> Lookup | Numbers | None:
    """How `term * factor`, over common axes, is stored, if `term` is coded and has no scales, and `factor` is its
    scales.

    None if they are not. Raises: Unaligned, as `scaled` does.
    """
    lookup, numbers, by = lookup_of(term), numbers_of(term), lookup_of(factor)
    if lookup is None:
        return replace(numbers, by=factor.read) if numbers is not None and numbers.by is None else None
    if not is_coded_lookup(lookup) or (by is not None and not all(step in WIDE for step in by.then)):
        return None
    return scaled(lookup, factor.read if by is None else by)


def is_coded(term: Term) -> bool:
    """Whether an element is a number of e4m3fn, int8 or int4 in a wider dtype, perhaps scaled."""
    lookup = lookup_of(term)
    return numbers_of(term) is not None if lookup is None else is_coded_lookup(lookup)


def is_coded_lookup(lookup: Lookup) -> bool:
    """Whether what is looked up is numbers of e4m3fn, int8 or int4 that were cast to wider dtypes only, perhaps
    scaled."""
    return dtype_of(lookup.pages) in CODED and _only_widened(lookup.then)


def widened(form: Form, node: fx.Node, dtype: torch.dtype) -> Form:
    """The form of a factor. If it is in int8, it is cast to the dtype of the product, as torch does implicitly."""
    return operations.cast(form, dtype) if widens(form, node, dtype) else form


def widens(form: Form, node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a cast to `dtype` widens a tensor in int8, or of numbers of 4 bits, all of which that dtype holds.

    Not if the tensor is known to be a sum or a product: it was computed in int8.
    """
    lookup = lookup_of(form.term)
    few = lookup is not None and not lookup.then and dtype_of(lookup.pages) in (UINT4, INT4)
    return (few or node.meta["val"].dtype == INT8) and dtype in WIDE and form.term.parts is None


def numbers_of(term: Term) -> Numbers | None:
    """The numbers that an element is, with their scales, if it is coded and not a lookup; else None."""
    stored, plain = term.stored, replace(term.read, then=())
    if stored is None and dtype_of(plain) in CODED:
        stored = Numbers(plain)
    if not isinstance(stored, Numbers):
        return None
    numbers = replace(stored, then=(*stored.then, *term.read.then))
    return numbers if _only_widened(numbers.then) else None


def dtype_of(read: Read) -> Any:
    """The dtype in which a tensor is read, before any cast; None if neither the graph nor `Bits` say it."""
    dtypes = [step.dtype for step in read.then if isinstance(step, Bits)]
    if dtypes or not isinstance(read.source, fx.Node):
        return dtypes[-1] if dtypes else None
    return read.source.meta["val"].dtype


def without_widening(read: Read) -> Read:
    """A read without the casts that change no number: those to a dtype that holds all that the numbers can be."""
    dtype = dtype_of(replace(read, then=()))
    within = dtype  # the narrowest dtype that the numbers have been in since they were computed
    rounded: list[Any] = []
    for step in read.then:
        if step in WIDE and (within in CODED or (within in WIDE and torch.promote_types(within, step) == step)):
            dtype = step
            continue
        rounded.append(step)
        dtype = step.dtype if isinstance(step, Bits) else dtype if isinstance(step, float) else step
        within = dtype
    return replace(read, then=tuple(rounded))


def groups_of(scales: Read, columns: Dim, tokens: Sequence[Dim]) -> Dim | None:
    """The slowest axes of the columns, over which the scales run; None if they run over more than these and whole
    `tokens`."""
    everywhere = {axis for dim in tokens for axis in dim}
    groups = columns[: len(scales.axes - everywhere)]
    over = {axis for dim in tokens if scales.axes & set(dim) for axis in dim}
    return groups if scales.axes == {*groups, *over} else None


def _may_be_cached(form: Form) -> bool:
    """Whether a tensor that its scales divide like this can be a cache rather than a weight.

    A cache has sequences, tokens and columns, and at most its columns are divided into groups. The scales of a weight
    may be those of blocks, which divide its rows.
    """
    return len(form.dims) > 2 and all(len(dim) < 2 for dim in form.dims[:-1])


def _only_widened(then: Sequence[Any]) -> bool:
    casts = [step for step in then if not isinstance(step, float)]
    return bool(casts) and all(step in WIDE for step in casts)
