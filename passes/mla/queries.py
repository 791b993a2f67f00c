"""Queries that are themselves an up-projection, of a latent of their own that is narrower than they are."""

from __future__ import annotations

from torch import fx

from ..algebra.operations import term_of
from ..algebra.sizes import Unaligned, known_at_most, product, total
from ..algebra.terms import Sum, Term
from ..trace.trace import Trace
from .products import gathered, up_projection
from .site import Site


def query_latent(site: Site, trace: Trace) -> fx.Node | None:
    """The tensor of which a site's queries without rope are an up-projection, if it is narrower than they are."""
    tokens = {*site.batch, *site.tokens}
    term = _what_is_read(site.nope.query, trace)
    if isinstance(term.parts, Sum):
        terms = gathered(term.parts.terms, tokens)
        term = terms[0] if len(terms) == 1 else term
    found = up_projection(term, tokens)
    if found is None or not isinstance(found.latent.read.source, fx.Node):
        return None
    latent = product(axis.size for axis in found.rank)
    queries = product([*(axis.size for axis in site.heads), total([site.sizes["P"], site.sizes["R"]])])
    return found.latent.read.source if known_at_most(total([latent, 1]), queries) else None


def _what_is_read(term: Term, trace: Trace) -> Term:
    """A term, or what the graph knows about the tensor that it reads."""
    source = term.read.source
    if term.parts is not None or not isinstance(source, fx.Node):
        return term
    try:
        return term_of(trace[source], term.read)
    except Unaligned:
        return term
