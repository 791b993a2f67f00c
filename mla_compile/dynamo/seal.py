"""Seal attention: replace F.scaled_dot_product_attention in Dynamo's graph by an op that no device decomposes.

When the graph is traced again, attention that the passes left unchanged is unsealed, so that Inductor gets exactly what
it would have had without this library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..ops import SEALED
from ..passes.nodes.arguments import all_arguments
from .control_flow import parts

_TENSORS = ("query", "key", "value", "attn_mask")


def _sealed(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, dropout_p: float, is_causal: bool) -> Tensor:
    """The SDPA call of `nn.MultiheadAttention`."""
    sealed: Tensor = SEALED(query, key, value, attn_mask, dropout_p, is_causal, None, False)
    return sealed


def _with_sealed_attention(function: Any) -> Callable[..., Any]:
    """A copy of a torch function that finds `_sealed` where the original finds SDPA."""
    names = {**function.__globals__, "scaled_dot_product_attention": _sealed}
    copy = FunctionType(function.__code__, names, "multi_head", function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    names[function.__name__] = copy  # the function passes itself to torch function modes, which call it
    # The text of a graph and torch's caches refer to it by its name in this module.
    copy.__module__, copy.__qualname__ = __name__, copy.__name__
    return copy


multi_head = _with_sealed_attention(F.multi_head_attention_forward)

CACHEABLE = {f"{__name__}.{multi_head.__name__}": torch.__version__}
"""For `unsafe_marked_cacheable_functions`: torch's caches must be told by name of a function that is not torch's."""


def seal(module: fx.GraphModule) -> int:
    """Seal every SDPA call of a Dynamo graph in place, including those of `nn.MultiheadAttention`; return how many."""
    count = _seal(module.graph, F.scaled_dot_product_attention)
    for node in module.graph.find_nodes(op="call_function", target=F.multi_head_attention_forward):
        node.target = multi_head
        count += 1
    if count:
        module.recompile()
    return count


def seal_with_parts(module: fx.GraphModule) -> None:
    """Seal a graph and all graphs that its control flow runs."""
    for graph in (module, *parts(module).values()):
        seal(graph)


def seal_exported(graph: fx.Graph) -> None:
    """Seal every SDPA op of an exported program's graph in place."""
    _seal(graph, torch.ops.aten.scaled_dot_product_attention.default)


def _seal(graph: fx.Graph, attention: Callable[..., Any]) -> int:
    count = 0
    for node in graph.nodes:
        if node.op != "call_function" or node.target is not attention:
            continue
        arguments = all_arguments(node, torch.ops.aten.scaled_dot_product_attention.default)
        if any(isinstance(value, fx.Node) for name, value in arguments.items() if name not in _TENSORS):
            continue  # a symbolic flag or scale: left to Inductor
        node.target = SEALED
        node.args, node.kwargs = tuple(arguments.values()), {}
        count += 1
    return count


def unseal(*args: Any) -> torch.Tensor:
    """The SDPA call that a sealed attention replaced."""
    query, key, value, mask, dropout, causal, scale, grouped = args
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)


def unseal_exported(graph: fx.Graph) -> None:
    """Turn the sealed attentions of an exported program's graph back into SDPA ops, in place."""
    for node in graph.nodes:
        if node.target is SEALED:
            *positional, scale, grouped = node.args
            node.target = torch.ops.aten.scaled_dot_product_attention.default
            node.args, node.kwargs = tuple(positional), {"scale": scale, "enable_gqa": grouped}


def _batched(
    info: Any, in_dims: Sequence[int | None], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, int]:
    """The `torch.vmap` rule: one sealed attention over tensors with the mapped dimension in front.

    Tensors that are not mapped over are expanded along it.
    """

    def mapped(tensor: Tensor, dim: int | None) -> Tensor:
        return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

    query, key, value = (mapped(t, dim) for t, dim in zip((query, key, value), in_dims, strict=False))
    if mask is not None:
        mask = mapped(mask, in_dims[3])
        mask = mask.reshape(mask.shape[0], *(1,) * (query.dim() - mask.dim()), *mask.shape[1:])
    if query.dim() <= 4:
        return SEALED(query, key, value, mask, *rest), 0
    # Merge the mapped dimension and the batch into one batch.
    batches = query.shape[:2]
    if mask is not None:
        mask = mask.expand(*batches, *mask.shape[2:]).flatten(0, 1)
    query, key, value = (t.flatten(0, 1) for t in (query, key, value))
    return SEALED(query, key, value, mask, *rest).unflatten(0, batches), 0


torch.library.register_vmap("mla::sealed_attention", _batched)
