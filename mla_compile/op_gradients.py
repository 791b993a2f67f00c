"""Register how the attention ops are differentiated: by an op for the backward, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .asked import told


def differentiate_by_op(
    library: torch.library.Library, name: str, count: int, *, by_what_is_asked: bool = False
) -> None:
    """Use `mla::<name>_backward` for the gradients of an attention whose first `count` arguments are differentiable.

    With `by_what_is_asked`, it is told what the forward was told, or what its caller asked for (`asked.py`): autograd
    calls it later, on a GPU in a thread of its own, or puts it into a graph.
    """

    def save(
        ctx: Any,
        inputs: tuple[Any, ...],
        output: tuple[Tensor, Tensor],
        keyword_only_inputs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        ctx.save_for_backward(*inputs[:count], *output)
        ctx.settings = inputs[count:]
        given = {name: value for name, value in keyword_only_inputs.items() if value}
        ctx.named = told() | given if by_what_is_asked else {}
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, grad_o: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        *operands, o, lse = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:count])
        if grad_o is None:
            grad_o = torch.zeros_like(o)
        backward = getattr(torch.ops.mla, f"{name}_backward")
        call = grad_o, grad_lse, *operands, *ctx.settings, o, lse, wanted
        found = iter(backward(*call, **ctx.named) if any(wanted) else ())
        return *(next(found) if asked else None for asked in wanted), *(None for _ in ctx.settings)

    torch.library.register_fake(f"mla::{name}_backward", _backward_fake, lib=library)
    torch.library.register_autograd(f"mla::{name}", gradients, setup_context=save, lib=library)


def _backward_fake(grad_o: Tensor, grad_lse: Tensor | None, *others: Any, **named: Any) -> list[Tensor]:
    *operands_and_settings, wanted = others
    operands = zip(operands_and_settings, wanted, strict=False)  # operands come first; `wanted` has a flag for each
    return [operand.new_empty(operand.shape) for operand, asked in operands if asked and operand is not None]


def differentiate_per_head_matmul(library: torch.library.Library) -> None:
    """Use products for the gradients of `mla::per_head_matmul`."""

    def save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, weight), (of_x, of_weight) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            torch.ops.mla.per_head_matmul(grad, weight.transpose(1, 2)) if of_x else None,
            torch.einsum("bsni,bsno->nio", x, grad) if of_weight else None,
        )

    torch.library.register_autograd("mla::per_head_matmul", gradients, setup_context=save, lib=library)


def refuse_to_differentiate(library: torch.library.Library, name: str) -> None:
    """Make a backward through `mla::<name>` raise NotImplementedError."""

    def backward(ctx: Any, *grads: Tensor | None) -> None:
        raise NotImplementedError(
            f"mla::{name} has no backward: expected inputs that need no gradient, found one that does. "
            "Run under torch.no_grad(), or compile this part of the model with another backend."
        )

    torch.library.register_autograd(f"mla::{name}", backward, lib=library)
