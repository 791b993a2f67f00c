"""Queries that are themselves an up-projection, of a latent of their own that is narrower than they are."""

from __future__ import annotations

from torch import fx

from ..algebra.sizes import known_at_most, product, total
from ..algebra.terms import Sum
from ..trace.trace import Trace
from .products import gathered, up_projection
from .site import Site


def query_latent(site: Site, trace: Trace) -> fx.Node | None:
    """The tensor of which a site's queries without rope are an up-projection, if it is narrower than they are."""
    tokens = {*site.batch, *site.tokens}
    query = site.nope.query
    term = query if query.parts is not None else trace.at(query.read)
    if isinstance(term.parts, Sum):
        terms = gathered(term.parts.terms, tokens)
        term = terms[0] if len(terms) == 1 else term
    found = up_projection(term, tokens)
    if found is None or not isinstance(found.latent.read.source, fx.Node):
        return None
    latent = product(axis.size for axis in found.rank)
    queries = product([*(axis.size for axis in site.heads), total([site.sizes["P"], site.sizes["R"]])])
    return found.latent.read.source if known_at_most(total([latent, 1]), queries) else None
