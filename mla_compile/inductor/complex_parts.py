"""On a GPU, compute with the real and imaginary parts of complex numbers, for which Inductor generates no code.

A rope with complex factors, as DeepSeek's own code has it, is some ten calls of ATen in each layer otherwise, and
nothing is fused across them. On a CPU a step takes as long either way; a prompt's rope takes thrice as long in parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_any, tree_map


@dataclass(frozen=True)
class Parts:
    """A complex tensor, and two real ones of its shape. What a traced graph does not read of them, it loses."""

    real: Tensor
    imaginary: Tensor
    whole: Tensor


def has_complex(graph: fx.Graph) -> bool:
    """Whether a graph computes with complex numbers."""
    return any(_is_complex(node.meta.get("val")) for node in graph.nodes)


def in_parts(value: Any) -> Any:
    """An input of a graph as `Parts`, if it is complex and that pays."""
    if not _is_complex(value) or value.is_conj():
        return value
    real, imaginary = torch.view_as_real(value).unbind(-1)
    return Parts(real, imaginary, value) if pays(real) else value


def call_in_parts(call: Callable[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`call` an op with arguments of which some may be `Parts`; so is the result, if it is complex and that pays."""
    handler = _HANDLERS.get(target)
    found = None if handler is None else handler(target, *args, **kwargs)
    if isinstance(found, Tensor):
        return found
    whole = call(target, *wholes((args, kwargs)))
    return whole if found is None else Parts(*found, whole)


def wholes(values: Any) -> Any:
    """Arguments or results with complex tensors in place of `Parts`."""
    if not tree_any(lambda value: isinstance(value, Parts), values):
        return values
    return tree_map(lambda value: value.whole if isinstance(value, Parts) else value, values)


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def pays(real: Tensor) -> bool:
    """Whether complex numbers with such real parts become parts."""
    return not real.is_cpu and real.dtype in (torch.float32, torch.float64)


_Found = tuple[Tensor, Tensor] | Tensor | None
"""The parts of a complex result, or a real one; None if the op is to be called with complex tensors."""


def _view_as_complex(op: Any, parts: Tensor) -> _Found:
    real, imaginary = parts.unbind(-1)
    return (real, imaginary) if pays(real) else None


def _view_as_real(op: Any, numbers: Any) -> _Found:
    """An elementwise op, unlike `torch.stack`."""
    if not isinstance(numbers, Parts):
        return None
    first = torch.arange(2, device=numbers.real.device) == 0
    return torch.where(first, numbers.real.unsqueeze(-1), numbers.imaginary.unsqueeze(-1))


def _polar(op: Any, absolute: Tensor, angle: Tensor) -> _Found:
    return (absolute * angle.cos(), absolute * angle.sin()) if pays(angle) else None


def _mul(op: Any, a: Any, b: Any) -> _Found:
    if not (isinstance(a, Parts) or isinstance(b, Parts)):
        return None
    if any(isinstance(factor, complex) or (_is_complex(factor) and factor.is_conj()) for factor in (a, b)):
        return None
    (c, d), (e, f) = (_parts_of(factor) for factor in (a, b))
    if d is None:
        return c * e, c * f
    if f is None:
        return c * e, d * e
    return c * e - d * f, c * f + d * e


def _parts_of(factor: Any) -> tuple[Any, Any]:
    """The real part of a factor, and its imaginary one, or None."""
    if isinstance(factor, Parts):
        return factor.real, factor.imaginary
    if not _is_complex(factor):
        return factor, None
    real, imaginary = torch.view_as_real(factor).unbind(-1)
    return real, imaginary


def _conj(op: Any, numbers: Any) -> _Found:
    return (numbers.real, -numbers.imaginary) if isinstance(numbers, Parts) else None


def _moved(op: Any, numbers: Any, *args: Any, **kwargs: Any) -> _Found:
    """The same for each part: for ops that only say where numbers are."""
    if not isinstance(numbers, Parts):
        return None
    return op(numbers.real, *args, **kwargs), op(numbers.imaginary, *args, **kwargs)


def _viewed(op: Any, numbers: Any, sizes: Any) -> _Found:
    """Parts may have other strides than the whole."""
    return _moved(torch.reshape, numbers, sizes)


_aten = torch.ops.aten
_MOVING = (
    *(_aten.expand.default, _aten.clone.default, _aten.alias.default, _aten.detach.default, _aten.index.Tensor),
    *(_aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.permute.default),
    *(_aten.transpose.int, _aten.slice.Tensor, _aten.select.int),
)
_HANDLERS: dict[Any, Callable[..., _Found]] = {
    **dict.fromkeys(_MOVING, _moved),
    _aten.view_as_complex.default: _view_as_complex,
    _aten.view_as_real.default: _view_as_real,
    _aten.view.default: _viewed,
    _aten._unsafe_view.default: _viewed,
    _aten.polar.default: _polar,
    _aten.mul.Tensor: _mul,
    _aten._conj.default: _conj,
}
