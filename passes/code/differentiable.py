"""The loop over groups of heads as one operator of a graph, which torch can differentiate.

Kept for backward   the tensors that the loop takes
Backward            a loop too: each group's result is computed again, and differentiated at once

The operator stands in graphs that are yet to be differentiated. AOTAutograd puts both loops in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops.while_loop import while_loop_op
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    make_fx,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _CachingTorchDispatchMode

from mla_compile.aliases import apart

from .loops import Attend, HeadDims, loop, over_groups


class OverGroups(HigherOrderOperator):
    """`over_groups` with a backward.

    `forward(*parts)` is the attention of a group of heads. `backward(grad, *parts)` gives the gradients of those of
    `parts` that are floating, given the gradient `grad` of that attention.
    """

    def __init__(self) -> None:
        super().__init__("mla_over_groups")

    def __call__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        tensors: Sequence[Tensor],
        dims: HeadDims,
        group: int,
        out: Tensor,
    ) -> Tensor:
        result: Tensor = super().__call__(forward, backward, tuple(tensors), tuple(dims), group, out)
        return result


OVER_GROUPS: Any = OverGroups()


def over_groups_with_gradients(
    attend: Attend, tensors: Sequence[Tensor], dims: HeadDims, group: int, out: Tensor
) -> Tensor:
    """`over_groups` of fake tensors, as one operator that has a backward."""
    tensors = apart(tensors)
    with (
        disable_proxy_modes_tracing(),
        torch.enable_grad(),
        enable_python_dispatcher(),
        torch._C._DisableAutocast(),  # the tensors have been cast already
        torch.autograd.graph.saved_tensors_hooks(_same, _same),  # hooks of the caller are not meant for these tensors
    ):
        parts = [_part(tensor, dim, group) for tensor, dim in zip(tensors, dims, strict=True)]

        def forward(*parts: Tensor) -> Tensor:
            return attend(parts)

        def backward(grad: Tensor, *parts: Tensor) -> list[Tensor]:
            leaves = [part.detach().requires_grad_(part.is_floating_point()) for part in parts]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            return list(torch.autograd.grad(attend(leaves), wanted, grad, materialize_grads=True))

        result = attend(parts)
        forward_graph = make_fx(forward, decomposition_table={})(*parts)
        backward_graph = _without_writes(make_fx(backward, decomposition_table={}), torch.empty_like(result), *parts)
        backward_graph.graph.eliminate_dead_code()
        backward_graph.recompile()
    filled: Tensor = OVER_GROUPS(forward_graph, backward_graph, tensors, dims, group, out)
    return filled


def _without_writes(trace: Callable[..., fx.GraphModule], *arguments: Tensor) -> fx.GraphModule:
    """A graph without writes to tensors: derivatives of some operations, as of `clamp`, write to what they computed."""
    graph = trace(*arguments)
    targets = (node.target for node in graph.graph.nodes)
    if any(isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable for target in targets):
        return make_fx(torch.func.functionalize(graph, remove="mutations"), decomposition_table={})(*arguments)
    return graph


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _part(tensor: Tensor, dim: int | None, group: int) -> Tensor:
    """An empty tensor like the part of a group of heads; if there is no dimension of heads, the whole, with its
    strides."""
    if dim is None:
        return tensor.new_empty_strided(tensor.shape, tensor.stride())
    return tensor.new_empty([group if i == dim else size for i, size in enumerate(tensor.shape)])


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        forward, backward, dims, group, out, *tensors = arguments
        ctx.backward_graph, ctx.dims, ctx.group = backward, dims, group
        ctx.save_for_backward(*tensors)
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            return over_groups(lambda parts: forward(*parts), tensors, dims, group, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[5:]
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            found = iter(_gradients(ctx.backward_graph, grad, tensors, wanted, ctx.dims, ctx.group))
        return (None,) * 5 + tuple(next(found) if want else None for want in wanted)


def _gradients(
    backward: fx.GraphModule,
    grad: Tensor,
    tensors: Sequence[Tensor],
    wanted: Sequence[bool],
    dims: HeadDims,
    group: int,
) -> list[Tensor]:
    """The gradients of the tensors that want one. Those of tensors without heads are summed over groups, in float32 at
    least."""
    floating = [i for i, tensor in enumerate(tensors) if tensor.is_floating_point()]
    asked = [i for i, want in enumerate(wanted) if want]

    def turn(here: Tensor, parts: Sequence[Tensor], *totals: Tensor) -> tuple[Tensor, ...]:
        found = dict(zip(floating, backward(*parts), strict=True))
        return tuple(_added(total, found[i], dims[i], here) for i, total in zip(asked, totals, strict=True))

    totals = [_zeros(tensors[i], summed=dims[i] is None) for i in asked]
    results = loop(turn, totals, [grad, *tensors], [1, *dims], group, grad.shape[1])
    return [total.to(tensors[i].dtype) for i, total in zip(asked, results, strict=True)]


def _added(total: Tensor, found: Tensor, dim: int | None, here: Tensor) -> Tensor:
    """The gradient `total` with `found`: added to it, or put in the place of the heads `here`."""
    return total + found.to(total.dtype).contiguous() if dim is None else total.index_copy(dim, here, found)


def _zeros(tensor: Tensor, *, summed: bool) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32) if summed else tensor.dtype
    return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)


def _autograd(forward: Any, backward: Any, tensors: Any, dims: Any, group: int, out: Tensor) -> Any:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Differentiated.apply(forward, backward, dims, group, out, *tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return OVER_GROUPS(forward, backward, tensors, dims, group, out)


def _run(forward: Any, backward: Any, tensors: Any, dims: Any, group: int, out: Tensor) -> Tensor:
    return over_groups(lambda parts: forward(*parts), tensors, dims, group, out)


def _functional(ctx: Any, forward: Any, backward: Any, tensors: Any, dims: Any, group: int, out: Tensor) -> Any:
    tensors, out = ctx.unwrap_tensors(tensors), ctx.unwrap_tensors(out)
    with ctx.redispatch_to_next():
        return ctx.wrap_tensors(_run(forward, backward, tensors, dims, group, out))


def _fake(mode: Any, forward: Any, backward: Any, tensors: Any, dims: Any, group: int, out: Tensor) -> Tensor:
    with mode:
        return torch.empty_like(out)


def _traced(mode: Any, forward: Any, backward: Any, tensors: Any, dims: Any, group: int, out: Tensor) -> Any:
    for name, graph in (("over_groups_forward", forward), ("over_groups_backward", backward)):
        taken = sum(hasattr(mode.tracer.root, f"{name}_{i}") for i in range(len(mode.tracer.root._modules) + 1))
        mode.tracer.root.register_module(f"{name}_{taken}", graph)
    arguments = pytree.tree_map(mode.tracer.unwrap_proxy, (forward, backward, tensors, dims, group, out))
    proxy = mode.tracer.create_proxy("call_function", OVER_GROUPS, arguments, {}, name="over_groups")
    with disable_proxy_modes_tracing():
        example = torch.empty_like(out)
    return track_tensor_tree(example, proxy, constant=None, tracer=mode.tracer)


OVER_GROUPS.py_impl(DispatchKey.Autograd)(_autograd)
OVER_GROUPS.py_impl(DispatchKey.CompositeExplicitAutograd)(_run)
OVER_GROUPS.py_functionalize_impl(_functional)
OVER_GROUPS.py_impl(FakeTensorMode)(_fake)
OVER_GROUPS.py_impl(ProxyTorchDispatchMode)(_traced)


def _in_a_checkpoint(mode: Any, *arguments: Any) -> Any:
    """Checkpoints ask for each operation whether to keep its result, and have no rule for loops:
    these results are not kept."""
    return while_loop_op(*arguments)


if _CachingTorchDispatchMode not in while_loop_op.python_key_table:
    while_loop_op.py_impl(_CachingTorchDispatchMode)(_in_a_checkpoint)
