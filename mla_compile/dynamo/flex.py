"""Write flex_attention out as tensor code, as its score and mask are functions that no pass can read.

    flex_attention(q, k, v, score_mod, (..., mask_mod), scale)
    ->  sealed_attention(q, k, v, mask_mod(b, h, i, j))                         if scores are not modified, else
        softmax(where(mask_mod(b, h, i, j), score_mod(q k, b, h, i, j), -inf)) v

Of a block mask only `mask_mod` is read, as by flex_attention without compilation: its blocks say where that is False.

The functions take one score and its four indices. If all their operations are elementwise, they can take all scores at
once, with indices that broadcast. Once the attention is rewritten, no full matrix of scores or masks is left.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from ..ops import SEALED
from ..passes.nodes.walk import makers, walk
from .graph import EXAMPLE

FLEX = torch.ops.higher_order.flex_attention
_INDICES = 4
"""The indices of batch, head, query and key."""
_NAMES = {
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "truediv": "div",
    "floordiv": "div",
    "floor_divide": "div",
    "mod": "remainder",
    "masked_fill": "where",
}
"""Python names that ATen does not have, or does not tag as pointwise, each with an ATen op that is as pointwise as
it."""
_CASTS = ("to", "float", "int", "long", "bool")
Function = Callable[..., Tensor]


def write_out(module: fx.GraphModule) -> int:
    """Write out every flex_attention of a Dynamo graph in place, where possible; return how many.

    It is not possible if more than the attention's output is read (log-sum-exp, largest scores), or if a function has
    operations that are not elementwise.
    """
    count, read = 0, set(walk([module.graph.output_node()], makers))
    for node in module.graph.find_nodes(op="call_function", target=FLEX):
        query, key, value, score_mod, block_mask, scale, _, *buffers = node.args
        if any(user.args[1] != 0 for user in node.users if user in read):
            continue
        graphs = [_graph_of(module, function) for function in (score_mod, block_mask[-1])]
        pairs = zip(graphs, buffers, strict=True)
        if not all(_is_always(graph) or _is_element_by_element(graph, given) for graph, given in pairs):
            continue
        functions = None if _is_identity(graphs[0]) else score_mod, None if _is_always(graphs[1]) else block_mask[-1]
        with module.graph.inserting_before(node):
            inputs = query, key, value, *functions, scale, *buffers
            o = module.graph.call_function(attention, inputs)
        o.meta = dict(node.meta)
        for user in node.users:
            if user.args[1] == 0:
                user.replace_all_uses_with(o)
        _erase(node)
        count += 1
    if count:
        module.recompile()
    return count


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Function | None,
    mask_mod: Function | None,
    scale: float,
    score_buffers: Sequence[Tensor] = (),
    mask_buffers: Sequence[Tensor] = (),
) -> Tensor:
    """Attention of query `[B, N, S, D]` over key `[B, M, T, D]` and value `[B, M, T, V]`; N is a multiple of M.

    Without `score_mod` scores are not modified; without `mask_mod` every query sees all keys.
    """
    sizes = *query.shape[:3], key.shape[2]
    indices = [
        torch.arange(size, device=query.device).view([size if i == dim else 1 for i in range(_INDICES)])
        for dim, size in enumerate(sizes)
    ]
    seen = None if mask_mod is None else mask_mod(*indices, *mask_buffers)
    grouped = query.shape[1] != key.shape[1]
    if score_mod is None:
        o: Tensor = SEALED(query, key, value, seen, 0.0, False, scale, grouped)
        return o
    if grouped:
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-2, -1)).to(dtype) * scale
    scores = score_mod(scores, *indices, *score_buffers)
    if seen is not None:
        scores = torch.where(seen, scores, -torch.inf)
    return torch._safe_softmax(scores, -1).to(value.dtype) @ value


def _erase(node: fx.Node) -> None:
    """Erase a node whose results do not reach the output, and everything that is made from it."""
    for user in list(node.users):
        if user in node.users:
            _erase(user)
    node.graph.erase_node(node)


def _graph_of(module: fx.GraphModule, function: fx.Node) -> fx.Graph:
    part = module.get_submodule(str(function.target))
    assert isinstance(part, fx.GraphModule)
    return part.graph


def _is_identity(graph: fx.Graph) -> bool:
    return graph.output_node().args[0] is next(iter(graph.nodes))


def _is_always(graph: fx.Graph) -> bool:
    """Whether this is flex_attention's default mask, which hides nothing."""
    given = graph.output_node().args[0]
    return isinstance(given, fx.Node) and given.op == "call_method" and given.target == "new_ones"


def _is_element_by_element(graph: fx.Graph, buffers: Sequence[fx.Node]) -> bool:
    """Whether a function of one score, applied to tensors of scores, gives the same as applied to each element."""
    given = graph.find_nodes(op="placeholder")
    pairs = zip(given[::-1], buffers[::-1], strict=False)
    ranks = {node: buffer.meta[EXAMPLE].dim() for node, buffer in pairs if isinstance(buffer.meta[EXAMPLE], Tensor)}
    return all(
        node.op in ("placeholder", "output")
        or (node.op == "call_function" and (_is_pointwise(node.target.__name__.strip("_")) or _is_lookup(node, ranks)))
        or (node.op == "call_method" and (_is_pointwise(node.target) or node.target in _CASTS or _is_number(node)))
        for node in graph.nodes
    )


def _is_pointwise(name: str) -> bool:
    """Whether the ATen op of this name is pointwise."""
    name = name.removeprefix("__").removesuffix("__")  # of a method, such as `__eq__` in torch 2.11
    packet = getattr(torch.ops.aten, _NAMES.get(name, name), None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    forms = [getattr(packet, form) for form in packet.overloads()]
    return any(torch.Tag.pointwise in form.tags for form in forms)


def _is_number(node: fx.Node) -> bool:
    """Whether a node makes a new tensor without dimensions."""
    size = node.args[1] if len(node.args) > 1 else node.kwargs.get("size")
    return node.target in ("new_ones", "new_zeros", "new_full") and size == ()


def _is_lookup(node: fx.Node, ranks: dict[fx.Node, int]) -> bool:
    """Whether a node reads one element of a buffer."""
    if node.target is not operator.getitem:
        return False
    table, index = node.args
    indices = index if isinstance(index, tuple) else (index,)
    known = isinstance(table, fx.Node) and ranks.get(table) == len(indices)
    return known and all(isinstance(index, fx.Node | int) for index in indices)
