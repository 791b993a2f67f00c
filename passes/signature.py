"""When two sites become the same code: the layers of a model are traced once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import fx

from .axes import Axis
from .pages import Pages
from .seen import Seen
from .site import Site


def signature(site: Site, seen: Seen, path: str, sources: Sequence[fx.Node], pages: Pages | None = None) -> Hashable:
    """Equal for two sites whose reads, layouts, scales and masks differ in nothing but which nodes and axes they name.

    `sources` are the nodes that the site reads, in the order in which its code takes them; `pages` where its keys are.
    """
    attention = site.attention
    sinks = [(s.term.read, s.keys, s.factor) for s in attention.sinks]
    pieces = [(p.query.read, p.summed, p.scale) for p in site.ropes]
    said = (
        (site.batch, site.tokens, site.heads, site.rank, attention.keys, attention.columns, attention.dims),
        (() if pages is not None else (site.latent, [p.key.read for p in site.ropes]), pages),
        (site.w_uk, site.w_uv, site.nope.query.read, site.nope.summed, site.nope.scale, pieces),
        site.biases,
        (path, seen.said(path), sinks, attention.strict_rows, _value(attention.node.meta["val"])),
        [_value(source.meta["val"]) for source in sources],
    )
    return _canonical(said, {source: i for i, source in enumerate(sources)}, {})


def _canonical(what: Any, sources: dict[fx.Node, int], axes: dict[Axis, int]) -> Hashable:
    """Nodes as their places among the sources, axes numbered as they come, everything else as it is."""
    if isinstance(what, Axis):
        return ("axis", axes.setdefault(what, len(axes)), what.size)
    if isinstance(what, fx.Node):
        return ("source", sources[what])
    if isinstance(what, list | tuple):
        return tuple(_canonical(part, sources, axes) for part in what)
    if is_dataclass(what):
        return tuple(_canonical(getattr(what, field.name), sources, axes) for field in fields(what))
    assert isinstance(what, Hashable)
    return what


def _value(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), str(value.device), str(tuple(value.shape)), str(value.stride()))
    return str(value)
