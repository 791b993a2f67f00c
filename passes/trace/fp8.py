"""Tensors in FP8 (e4m3fn) that a graph makes wider and multiplies with scales: what they are made of is kept beside.

    node = lookup.to(dtype) * scales        a lookup, of pages with scales
    node = tensor.to(dtype) * scales        numbers and scales of all keys: a cache that is a buffer, or grows

The form of such a product is a leaf, as any other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mla_compile.fp8 import FP8

from ..algebra.gathers import Lookup, composed, scaled
from ..algebra.numbers import Numbers
from ..algebra.sizes import Unaligned
from ..algebra.terms import Bits, Dim, Form, Read
from .handler import Forms, lookup_of
from .weights import factors

WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that hold every number of e4m3fn."""


def dequantized_read(trace: Forms, node: fx.Node) -> Form | None:
    """The form of a product, a leaf, if it is a tensor in FP8 times scales; what it is made of is kept in the trace."""
    if not any(in_fp8(trace, trace[operand]) for operand in node.all_input_nodes):
        return None
    try:
        whole, forms = factors(trace, node)
        for form, factor in (forms, forms[::-1]) if len(forms) == 2 else ():
            lookup, by = (lookup_of(trace, f.term.read) for f in (form, factor))
            numbers = numbers_of(trace, form.term.read)
            if lookup is not None and is_fp8(lookup):
                if by is not None and not all(step in WIDE for step in by.then):
                    return None
                trace.lookups[node] = scaled(lookup, factor.term.read if by is None else by)
                return whole
            if lookup is None and numbers is not None and numbers.by is None and _may_be_cached(whole):
                trace.numbers[node] = replace(numbers, by=factor.term.read)
                return whole
    except Unaligned:
        pass
    return None


def in_fp8(trace: Forms, form: Form) -> bool:
    """Whether a tensor holds numbers of e4m3fn in a wider dtype, perhaps scaled."""
    try:
        lookup = lookup_of(trace, form.term.read)
        return is_fp8(lookup) if lookup is not None else numbers_of(trace, form.term.read) is not None
    except Unaligned:
        return False


def is_fp8(lookup: Lookup) -> bool:
    """Whether what is looked up are numbers of e4m3fn, perhaps scaled: they were cast to wider dtypes only."""
    return dtype_of(lookup.pages) == FP8 and _only_widened(lookup.then)


def numbers_of(trace: Forms, read: Read) -> Numbers | None:
    """What a read of a tensor in FP8 says, over its own axes; None if it is no such tensor.

    Raises: Unaligned, as `composed` does.
    """
    source: Any = read.source
    known = trace.numbers.get(source)
    if known is not None:
        reads = [known.of] if known.by is None else [known.of, known.by]
        (of, *by), _ = composed(reads, trace[source], read)
        known = Numbers(of, by[0] if by else None, (*known.then, *read.then))
    elif dtype_of(replace(read, then=())) == FP8:
        known = Numbers(replace(read, then=()), None, read.then)
    return known if known is not None and _only_widened(known.then) else None


def dtype_of(read: Read) -> Any:
    """The dtype of a tensor as it is read, before any cast; None if the graph has no such tensor."""
    dtypes = [step.dtype for step in read.then if isinstance(step, Bits)]
    if dtypes or not isinstance(read.source, fx.Node):
        return dtypes[-1] if dtypes else None
    return read.source.meta["val"].dtype


def groups_of(scales: Read, columns: Dim, tokens: Sequence[Dim]) -> Dim | None:
    """The slowest of the columns, over which scales run; None if they run over more than these and whole `tokens`."""
    everywhere = {axis for dim in tokens for axis in dim}
    groups = columns[: len(scales.axes - everywhere)]
    over = {axis for dim in tokens if scales.axes & set(dim) for axis in dim}
    return groups if scales.axes == {*groups, *over} else None


def _may_be_cached(form: Form) -> bool:
    """Whether a tensor that scales divide so is a cache and no weight, whose rows blocks of scales may not divide.

    A cache has sequences, tokens and columns, and groups of columns at most.
    """
    return len(form.dims) > 2 and all(len(dim) < 2 for dim in form.dims[:-1])


def _only_widened(then: Sequence[Any]) -> bool:
    casts = [step for step in then if not isinstance(step, float)]
    return bool(casts) and all(step in WIDE for step in casts)
