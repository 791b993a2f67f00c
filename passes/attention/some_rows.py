"""Describe the scores of some rows only, where a product takes the weights of these and not of others.

softmax(s)[:, ::2] @ v             every second head, as differential attention takes them
softmax(s)[:, :, -1:] @ v          the last query
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from ..algebra import operations
from ..algebra.sizes import product, same
from ..algebra.terms import Digit, Form, Read
from .summands import Mask, Sink, Summand


def is_of_some_rows(weights: Read, keys: int) -> bool:
    """Whether a read of weights, whose keys are dimension `keys`, takes not all rows of them."""
    return any(not digit.whole for i, digits in enumerate(weights.dims) if i != keys for digit in digits)


def in_rows(summand: Summand, weights: Read, keys: int) -> Summand:
    """A summand of the scores in those rows that a read of weights takes, whose keys are dimension `keys`.

    Raises:
        Unaligned: if it divides the rows otherwise.
    """

    def taken(form: Form, labels: Sequence[Hashable]) -> Form:
        for i, label in reversed(list(enumerate(labels))):
            if isinstance(label, int) and label != keys and form.dims[i]:
                form = _taken(form, i, weights.dims[label])
        return form

    form = taken(summand.form, summand.labels)
    what = replace(summand.what, term=form.term) if isinstance(summand.what, Mask | Sink) else summand.what
    factors = tuple(replace(each, form=taken(each.form, each.labels)) for each in summand.factors)
    return replace(summand, form=form, what=what, factors=factors)


def _taken(form: Form, dim: int, digits: Sequence[Digit]) -> Form:
    """The elements of dimension `dim` that `digits` name."""
    sizes = [digit.extent for digit in digits]
    if digits and not (same(digits[0].before, 0) and same(digits[0].after, 0)):
        form = operations.take(form, dim, digits[0].before, product(sizes))
    form = operations.view(form, (*form.shape[:dim], *sizes, *form.shape[dim + 1 :]))
    for k, digit in reversed(list(enumerate(digits))):
        if digit.axis is None:
            form = operations.select(form, dim + k, digit.start)
        else:
            form = operations.take(form, dim + k, digit.start, digit.axis.size, digit.step)
    end = dim + sum(digit.axis is not None for digit in digits)
    merged = tuple(axis for axes in form.dims[dim:end] for axis in axes)
    return replace(form, dims=(*form.dims[:dim], merged, *form.dims[end:]))
