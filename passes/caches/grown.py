"""Find caches that are copied whenever they grow: the `cat` of what was kept and what is new is kept in turn."""

from __future__ import annotations

from torch import fx

from ..algebra.sizes import product, total
from ..algebra.terms import Read
from ..mla.site import Site
from ..nodes.arguments import arguments, aten
from ..nodes.shapes import size_of


def copying(site: Site) -> str:
    """What a step copies of the cache and how to avoid that, for a report; empty if nothing is copied."""
    read = [site.latent.read, *(rope.key.read for rope in site.ropes)]
    copied = dict.fromkeys(node for part in read if (node := _grown(part)) is not None)
    if not copied:
        return ""
    size = total(product([size_of(v.shape[-1]), v.element_size()]) for v in (node.meta["val"] for node in copied))
    many = f"{size:,}" if isinstance(size, int) else str(size)
    saved = "a cache that is written in place avoids this (mla_compile.LatentCache)"
    return f"each step copies the whole cache, {many} bytes per token: {saved}"


def _grown(read: Read) -> fx.Node | None:
    """The cache that was kept before, if what is read is its `cat` with new tokens, and this is kept in turn."""
    node = read.source
    if not isinstance(node, fx.Node) or node.target is not aten.cat.default:
        return None
    past, *new = arguments(node)[0]
    kept = any(user.op == "output" for user in node.users)
    return past if kept and new and past.op == "placeholder" else None
