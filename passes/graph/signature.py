"""Tell when two sites become the same code, so that the layers of a model are traced once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..algebra.renaming import Renaming
from ..algebra.terms import Axis
from ..mla.site import Site
from ..nodes.common_subexpressions import number_key
from ..nodes.shapes import hint_of, size_of


def signature(site: Site, code_said: object, sources: Sequence[fx.Node], environment: ShapeEnv | None) -> Hashable:
    """A key that two sites share if their reads, layouts, scales and masks differ only in what they name.

    They name nodes, axes, and symbols of sizes; these symbols have to have the same hint and range. `code_said` is
    all that the code of the site depends on besides the site, such as its keys and masks. `sources` are the nodes
    that it reads, in the order in which it takes them.
    """
    attention = site.attention
    sinks = [(s.term.read, s.keys, s.factor) for s in attention.sinks]
    pieces = [(p.query.read, p.summed, p.scale) for p in site.ropes]
    second = site.second_latent and (site.second_latent.latent.read, site.second_latent.rank)
    shifts = [(p.query.read, p.key.read, p.summed, p.scale) for p in site.shifts]
    said = (
        (site.batch, site.tokens, site.heads, site.rank, attention.keys, attention.columns, attention.dims),
        code_said,
        (site.w_uk, site.w_uv, site.nope.query.read, site.nope.summed, site.nope.scale, pieces, shifts),
        (site.biases, site.value_scale, attention.padding, site.apart, second),
        (sinks, attention.share, attention.strict_rows, attention.numbers),
        [(source.meta["val"], source.op) for source in sources],
    )
    canonical = _Canonical({source: i for i, source in enumerate(sources)})
    values = canonical(said)
    output = attention.node.meta["val"]
    output = str(output.shape), output.dtype  # later code is traced with these very symbols
    return values, output, canonical.symbols(environment)


class _Canonical:
    """Replaces nodes by their places among the sources, and numbers axes and symbols as they appear; all else stays."""

    def __init__(self, sources: dict[fx.Node, int]) -> None:
        self.sources, self.axes, self.rename = sources, dict[Axis, int](), Renaming()

    def __call__(self, what: Any) -> Hashable:
        if isinstance(what, Axis):
            return ("axis", self.axes.setdefault(what, len(self.axes)), self(what.size))
        if isinstance(what, fx.Node):
            return ("source", self.sources[what])
        if isinstance(what, torch.Tensor):
            return (what.dtype, str(what.device), self(tuple(what.shape)), self(what.stride()))
        if isinstance(what, torch.SymInt):
            return self(size_of(what))
        if isinstance(what, sympy.Expr):
            return self.rename(what)
        if isinstance(what, list | tuple):
            return tuple(self(part) for part in what)
        if is_dataclass(what):
            return (type(what).__name__, *(self(getattr(what, field.name)) for field in fields(what) if field.compare))
        if isinstance(what, float):
            return number_key(what)
        assert isinstance(what, Hashable)
        return type(what), what

    def symbols(self, environment: ShapeEnv | None) -> Hashable:
        """What torch knows of the symbols: they are interchangeable only if this is the same."""
        if environment is None:
            return ()
        return tuple((hint_of(s, environment), str(environment.var_to_range.get(s))) for s in self.rename.renamed)
