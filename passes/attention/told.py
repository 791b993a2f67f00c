"""What the graph knows about a tensor that is read in pieces: the pieces, joined again, may know less than it does."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from torch import fx

from ..algebra import operations
from ..algebra.sizes import Unaligned
from ..algebra.terms import Bits, Dim, Form, Join, Term
from ..trace.trace import Trace


def told(term: Term, keys: Dim, trace: Trace) -> Term:
    """A term with what the graph knows about the tensor that it reads, if the term itself does not say.

    A tensor that is joined along the keys is a cache, which is read as a whole: its term stays as it is.
    """
    source, then = term.read.source, term.read.then
    if term.parts is not None or not isinstance(source, fx.Node) or any(isinstance(step, Bits) for step in then):
        return term
    with contextlib.suppress(Unaligned):
        known = operations.term_of(trace[source], replace(term.read, then=()))
        number = math.prod(term.read.factors, start=1.0)
        if isinstance(known.parts, Join) and known.parts.axis in keys:
            return term
        return term if known.parts is None else operations.scaled(Form((), known), number).term
    return term
