"""What masks mean as text, one line for each kind: which keys `t` a query `s` of a sequence `b` attends to.

causal: t <= s + 12
lengths: t < seq_lens[b]
padding: of seen[b, t]
"""

from __future__ import annotations

from collections.abc import Iterator

from ..algebra.sizes import same
from ..algebra.terms import Axis
from ..masks.joined import OfParts
from ..masks.kind import Kind
from ..masks.meaning import Meaning
from ..masks.naming import Listed, Naming
from ..masks.positions import Affine
from ..mla.site import Site
from .names import Names, names_of
from .terms import read_text


def mask_text(site: Site, meaning: Meaning) -> str:
    """A meaning, one line for each kind, and what hidden scores become if that is a finite number."""
    names = names_of(site)
    lines = [f"{' + '.join(kind.words)}: {' and '.join(_conditions(kind, site, names))}" for kind in meaning.kinds]
    if meaning.uniform_when_empty:
        lines.append(f"hidden scores are {meaning.fill:g}: a query that sees no key attends to all alike")
    return "\n".join(lines or ["none"]) + "\n"


def _conditions(kind: Kind, site: Site, names: Names) -> Iterator[str]:
    key, query = (",".join(map(names, axes)) for axes in (site.attention.keys, site.tokens))
    bound = kind.bound(site)
    if kind.causal_offset is not None:
        yield f"{key} <= {_sum(query or '0', _affine(Affine(kind.causal_offset), names))}"
    elif kind.names is not None:
        yield from _named(kind.names, key, names)
    elif bound is not None:
        yield from (f"{key} < {_affine(length, names)}" for length in bound.lengths)
        yield from (f"{key} <= {_sum(query or '0', _affine(place, names))}" for place in bound.positions)
    else:
        yield "of " + ", ".join(read_text(read, names) for read in kind.reads)


def _named(naming: Naming, key: str, names: Names) -> Iterator[str]:
    match naming:
        case Listed(named):
            yield f"{key} in {read_text(named.indices, names)}"
        case OfParts(parts):
            for part in parts:
                own = names(part.key)
                yield f"{key} = {_sum(own, _affine(Affine(part.start), names))}"
                yield from _named(part.naming, own, names)
                for kind in part.kinds:
                    yield from _conditions(kind, part.site, names)


def _affine(value: Affine, names: Names) -> str:
    words = "" if same(value.const, 0) else str(value.const)
    for what, factor in value.terms:
        term = names(what) if isinstance(what, Axis) else read_text(what, names)
        words = _sum(words, term if factor == 1 else f"{factor} * {term}")
    return words or "0"


def _sum(a: str, b: str) -> str:
    if a in ("", "0") or b in ("", "0"):
        return b if a in ("", "0") else a
    return f"{a} - {b[1:]}" if b.startswith("-") else f"{a} + {b}"
