"""Mark what the backward recomputes.

If the attention's scores must exist: keys and values, by the user's own code.
Always: operands that are assembled for the op alone, for instance a weight with the columns of an adapter beside it.
If asked for: queries, from the latent of which they are an up-projection.

Kept for backward   q `[B, Sq, N, P + R]`: 49,152 bytes a token of DeepSeek-V3 in bf16
With this           q_latent `[B, Sq, Lq]`, 3,072 bytes, which the gradient of the up-projection needs anyway

Nodes to recompute are marked like those of a checkpoint, and AOTAutograd's partitioner moves them to the backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mla_compile.passes.code.differentiable import OVER_GROUPS
from mla_compile.passes.nodes.arguments import aten
from mla_compile.passes.nodes.refusal import Refusal
from mla_compile.passes.nodes.source import where
from mla_compile.passes.nodes.walk import makers, users, walk
from mla_compile.passes.outcome import QUERY_LATENT, UP_PROJECTIONS

from .capture import Captured
from .gradients import Writes, between
from .splice import ends

_SAME = (
    aten._to_copy.default,
    aten._unsafe_view.default,
    aten.alias.default,
    aten.clone.default,
    aten.permute.default,
    aten.reshape.default,
    aten.squeeze.dim,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
)
_QUERIES = {torch.ops.mla.expanded_attention.default: 1, torch.ops.mla.latent_attention.default: 2, OVER_GROUPS: 1}
"""How many of an op's first tensors are queries."""
_ATTENTIONS = tuple(_QUERIES)


def recompute_operands(code: Collection[fx.Node]) -> None:
    """In the code that replaced a site, mark the nodes that make its latent, rope key and weights."""
    own = set(code)
    operands = [operand for node in own if node.target in _ATTENTIONS for operand in _operands(node)[_queries(node) :]]
    for node in walk(operands, lambda node: node.all_input_nodes if node in own else ()):
        if node in own:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def recompute_keys_and_values(captured: Captured, output: fx.Node) -> None:
    """Mark the Dynamo nodes that make keys and values from their latent, or from one each, for the site that ends in
    the ATen node `output`.

    Raises:
        Refusal: if the Dynamo graph does not have the latents, or recomputed keys and values would differ.
    """
    latent_names, product_names = output.meta[UP_PROJECTIONS]
    named = {node.name: node for node in captured.module.graph.nodes}
    products, latents, starts = [named[name] for name in product_names], list[fx.Node](), list[fx.Node]()
    for latent in map(named.get, latent_names):
        origins = [origin for node in _first_known(captured, latent) for origin in captured.origins[node]]
        if latent is None or not origins:
            raise Refusal(output, "expected a latent that Dynamo's graph has too, found none there")
        latents.append(latent)
        starts += origins
    seeded = next(filter(_is_seeded, _made(latents, products, output, {})), None)
    if seeded is not None:
        reason = (
            f"expected keys and values that are the same when they are recomputed, found randomness in {where(seeded)}"
        )
        raise Refusal(output, reason)
    of_keys = [captured.places[node][-1] for product in products for node in ends(captured, product)]
    for end in ends(captured, output):
        place = captured.places[end][-1]
        made = _made(starts, of_keys, place, captured.writes)
        for values in [node for node in place.all_input_nodes if node in made]:
            with captured.dynamo.inserting_after(values):  # a copy made inside the product would be kept for backward
                whole = captured.dynamo.call_method("contiguous", (values,))
            whole.meta = dict(values.meta)
            place.replace_input_with(values, whole)
            made.append(whole)
        _recompute(captured, made)


def _made(latents: list[fx.Node], products: list[fx.Node], output: fx.Node, writes: Writes) -> list[fx.Node]:
    """The nodes computed from `latents` and not from a product, from which the products and the output are computed;
    without `latents`, `products` and `output` themselves."""
    of_latents, of_products = (set(walk(nodes, users)) for nodes in (latents, products))
    known = {*latents, *products}
    before = {node for end in (*products, output) for node in between(end, known - {end}, writes)}
    return [node for node in before if node in of_latents and node not in of_products | known | {output}]


def recompute_queries(captured: Captured, output: fx.Node, code: Collection[fx.Node]) -> None:
    """Mark the queries of the site that ends in the ATen node `output`, in its new Dynamo nodes `code`.

    Raises:
        Refusal: if they are not an up-projection of a latent of their own, or recomputed queries would differ.
    """
    name = output.meta.get(QUERY_LATENT)
    latent = next((node for node in captured.module.graph.nodes if node.name == name), None)
    starts = [origin for node in _first_known(captured, latent) for origin in captured.origins[node]]
    if latent is None or not starts:
        raise Refusal(
            output, "expected queries that are an up-projection of a narrower latent to recompute them from, found none"
        )
    seeded = next(filter(_is_seeded, _between([latent], attention_of(output))), None)
    if seeded is not None:
        raise Refusal(
            output, f"expected queries that are the same when they are recomputed, found randomness in {where(seeded)}"
        )
    for attention in code:
        if attention.target in _ATTENTIONS:
            _recompute(captured, _between(starts, attention))


def _recompute(captured: Captured, nodes: Iterable[fx.Node]) -> None:
    """Mark Dynamo nodes, but not those with effects, which happen once: what these return is kept."""
    for node in nodes:
        if node not in captured.effects:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _first_known(captured: Captured, latent: fx.Node | None) -> Iterable[fx.Node]:
    """The latent, or casts and views of it, as far as the Dynamo graph has them."""
    if latent is None:
        return ()
    own = walk([latent], lambda node: () if node in captured.origins else (u for u in node.users if u.target in _SAME))
    return (node for node in own if captured.origins.get(node))


def attention_of(end: fx.Node) -> fx.Node:
    """The attention op from which `end` is computed."""
    return next(node for node in walk([end], makers) if node.target in _ATTENTIONS)


def _operands(attention: fx.Node) -> list[fx.Node]:
    """The tensors of an op, its queries first."""
    tensors = attention.args[2] if attention.target is OVER_GROUPS else attention.all_input_nodes
    assert isinstance(tensors, list | tuple)
    return [tensor for tensor in tensors if isinstance(tensor, fx.Node)]


def _queries(attention: fx.Node) -> int:
    return _QUERIES[attention.target]


def _between(starts: Iterable[fx.Node], attention: fx.Node) -> list[fx.Node]:
    """The nodes on the way from `starts` to the queries of an op, without `starts`."""
    made_of = set(walk(_operands(attention)[: _queries(attention)], makers))
    return [node for node in walk(starts, users) if node in made_of and node not in starts]


def _is_seeded(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
