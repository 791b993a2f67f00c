"""A proved site as text: what each of its tensors is in the graph, and the attention that they make.

latent[b, t, l]  = add_3[b, t, l]
k_rope[b, t, r]  = cat_1[b, 0, t, r]
w_uk[n, p, l]    = kv_b[n * 256 + p, l]
score[b, s, n, t] = 0.088 * (sum_p q_nope k + sum_r q_rope k_rope)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ..algebra.terms import Dim, Read
from ..mla.apart import up_projected_apart
from ..mla.site import Site
from .names import Names, names_of
from .terms import read_text

T = TypeVar("T")


def site_text(site: Site) -> str:
    """A site, one line for each tensor; sizes first, in the order of their letters."""
    site = up_projected_apart(site)
    names = names_of(site)
    lines = list(_tensors(site, names))
    sizes = " ".join(f"{word}={size}" for word, size in site.sizes.items())
    width = max(len(left) for left, _ in lines)
    body = "\n".join(f"{left:<{width}} = {right}" for left, right in lines)
    return f"{site.node.name}: {sizes}\n{body}\n"


def _tensors(site: Site, names: Names) -> Iterator[tuple[str, str]]:
    rows, keys = (site.batch, site.tokens, site.heads), site.attention.keys
    columns, nope, second = site.attention.columns, site.nope, site.second_latent

    def line(name: str, read: Read, *dims: Dim) -> tuple[str, str]:
        return f"{name}{names.shape(dims)}", read_text(read, names)

    if second is not None:
        yield line("latent_k", second.latent.read, site.batch, keys, second.rank)
    yield line("latent", site.latent.read, site.batch, keys, site.rank)
    if site.w_uk is not None:
        yield line("w_uk", site.w_uk, site.heads, nope.summed, site.rank if second is None else second.rank)
    if site.w_uv is not None:
        yield line("w_uv", site.w_uv, site.heads, columns, site.rank)
    if site.unproved_keys is not None:
        yield from _scores_as_they_are(site, line)
    elif not site.apart:
        yield line("q_nope", nope.query.read, *rows, nope.summed)
    for own, rope in _numbered(site.ropes):
        yield line(f"q_rope{own}", rope.query.read, *rows, rope.summed)
        heads = (site.heads,) if site.differs(rope) else ()
        yield line(f"k_rope{own}", rope.key.read, site.batch, keys, *heads, rope.summed)
    for own, rope in _numbered(site.own_ropes):
        yield line(f"q_own{own}", rope.query.read, *rows, rope.summed)
        yield line(f"k_own{own}", rope.key.read, site.batch, site.heads, keys, rope.summed)
    for added in site.biases:
        yield line("bias", added, *rows, columns)
    for shift in site.shifts:
        yield line("q_shift", shift.query.read, *rows, shift.summed)
        yield line("k_shift", shift.key.read, *rows, shift.summed)
    for sink in site.attention.sinks:
        name, text = line("sink", sink.term.read, *rows, sink.keys)
        yield name, text if sink.factor == 1 else f"{sink.factor:g} * {text}"
    if site.attention.share > -math.inf:
        yield "share", f"{site.attention.share:g}"
    if site.unproved_keys is None or site.attention.opaque is None:
        yield f"score{names.shape((*rows, keys))}", _score(site, names)
    values = "latent" if site.w_uv is None else f"(sum_{_letters(site.rank, names)} latent w_uv)"
    values = values if site.value_scale == 1.0 else f"{site.value_scale:g} * {values}"
    bias = " + bias" * len(site.biases)
    weights = "weights" if site.attention.opaque is not None else "softmax(score)"
    yield f"o{names.shape((*rows, columns))}", f"sum_{_letters(keys, names)} {weights} {values}{bias}"


def _scores_as_they_are(site: Site, line: Callable[..., tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Lines for keys of which no more is known: the weights, if some function made them; else what is multiplied."""
    rows, keys, opaque = (site.batch, site.tokens, site.heads), site.attention.keys, site.attention.opaque
    if opaque is not None:
        yield line("weights", opaque.weights, *rows, keys)
        return
    for own, score in _numbered(site.attention.scores):
        yield line(f"q{own}", score.query.read, *rows, score.summed)
        yield line(f"k{own}", score.key.read, site.batch, site.heads, keys, score.summed)


def _score(site: Site, names: Names) -> str:
    nope = site.nope
    if site.unproved_keys is not None:
        products = (
            f"{score.scale:.6g} * sum_{_letters(score.summed, names)} q{own} k{own}"
            for own, score in _numbered(site.attention.scores)
        )
        return " + ".join(products)
    key = "latent" if site.w_uk is None else f"(sum_{_letters(site.rank, names)} latent w_uk)"
    if site.second_latent is not None:
        key = f"(sum_{_letters(site.second_latent.rank, names)} latent_k w_uk)"
    parts = [] if site.apart else [f"{nope.scale:.6g} * sum_{_letters(nope.summed, names)} q_nope {key}"]
    for own, rope in _numbered(site.ropes):
        parts.append(f"{rope.scale:.6g} * sum_{_letters(rope.summed, names)} q_rope{own} k_rope{own}")
    for own, rope in _numbered(site.own_ropes):
        parts.append(f"{rope.scale:.6g} * sum_{_letters(rope.summed, names)} q_own{own} k_own{own}")
    parts += [f"{shift.scale:.6g} * sum_{_letters(shift.summed, names)} q_shift k_shift" for shift in site.shifts]
    return " + ".join(parts)


def _numbered(items: Sequence[T]) -> Iterator[tuple[str, T]]:
    """Each item with its number, which is empty if there is only one item."""
    for number, item in enumerate(items):
        yield "" if len(items) == 1 else str(number), item


def _letters(axes: Dim, names: Names) -> str:
    return ",".join(map(names, axes))
