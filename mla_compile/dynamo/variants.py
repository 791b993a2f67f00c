"""Limit the variants of one function: torch compiles eight, and from then on runs other inputs uncompiled.

A function whose attention was rewritten loses more by that than others do. So once one size of a tensor varies, all its
sizes become dynamic, which makes fewer variants, and the last variant warns. With compile regions sizes are left to
torch: where it repeats a region and a size turns out to be fixed, it finds no symbol for it and raises KeyError.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import config, pgo
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import CompileContext
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from .graph import EXAMPLE
from .regions import has_regions

_MOST_SHOWN = 4


@dataclass(frozen=True)
class _Variant:
    """What torch compiled a function for: its input tensors, parameters excluded, and the modes that were on."""

    sizes: dict[str, list[Any]]
    """Those with which each input was traced."""
    shown: dict[str, str]
    """Those for which it was compiled."""
    rest: dict[str, str]
    """Dtypes of inputs and modes."""


@dataclass
class _Function:
    """A function that torch compiles: its code, the class of its `self`, and the inputs of its variants so far."""

    code: CodeType
    owner: str
    variants: list[_Variant] = field(default_factory=list)
    objects: set[int] = field(default_factory=set)
    """The identities of its `self`s."""

    def __str__(self) -> str:
        file = "/".join(self.code.co_filename.split("/")[-3:])
        return f"{self.code.co_name} of {self.owner} ({file}:{self.code.co_firstlineno})"


_functions: dict[int, _Function] = {}


def remember(module: fx.GraphModule) -> None:
    """Record a Dynamo graph with rewritten attention that is being compiled.

    Warns if torch will compile no further variant of its function.
    """
    now = CompileContext.current_compile_id()
    if now is None or now.frame_id is None or now.frame_compile_id is None:
        return  # the backend was called directly, not by torch
    root: Any = InstructionTranslator.current_tx()
    function = _functions.get(now.frame_id)
    if function is None or function.code is not root.f_code or now.frame_compile_id == 0:
        owner = type(root.f_locals["self"]).__name__ if "self" in root.f_locals else root.f_globals.get("__name__", "?")
        function = _functions[now.frame_id] = _Function(root.f_code, owner)
    inputs = dict(_inputs(module.graph))
    function.objects.add(id(root.f_locals.get("self")))
    function.variants.append(_variant(inputs))
    if not has_regions(module):
        _open_sizes(root, {name for name, node in inputs.items() if _grows(node)})
    count = now.frame_compile_id + 1
    if count == config.recompile_limit:
        warnings.warn(_last_variant(function, count), stacklevel=2)


def _inputs(graph: fx.Graph) -> Iterator[tuple[str, fx.Node]]:
    for node in graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        value = node.meta.get(EXAMPLE)
        if source is not None and isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter):
            yield source.name if isinstance(source.name, str) else source.name(), node


def _variant(inputs: dict[str, fx.Node]) -> _Variant:
    values = {name: node.meta[EXAMPLE] for name, node in inputs.items()}
    rest = {f"{name}.dtype": str(value.dtype).removeprefix("torch.") for name, value in values.items()}
    rest |= {f"{name}.requires_grad": str(value.requires_grad) for name, value in values.items()}
    modes = {"gradients": torch.is_grad_enabled(), "inference mode": torch.is_inference_mode_enabled()}
    rest |= {name: "on" if on else "off" for name, on in modes.items()}
    for device in sorted({value.device.type for value in values.values()}):
        on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if on else "off"
        rest[f"autocast of {device}"] = dtype
    sizes = {name: [_now(size) for size in value.shape] for name, value in values.items()}
    return _Variant(sizes, {name: _sizes(value) for name, value in values.items()}, rest)


def _now(size: Any) -> int | None:
    """The present value of a size; None if only a run knows it."""
    return size if isinstance(size, int) else size.node.hint


def _sizes(value: Tensor) -> str:
    return "[" + ", ".join(str(int(size)) if is_concrete_int(size) else "any" for size in value.shape) + "]"


def _grows(node: fx.Node) -> bool:
    """Whether the graph returns the tensor with something appended: a cache that will be longer next time."""
    return any(user.target is torch.cat and any(after.op == "output" for after in user.users) for user in node.users)


def _open_sizes(root: Any, growing: set[str]) -> None:
    """Make all sizes dynamic, from the next variant on, of each tensor that grows or whose sizes have varied.

    torch makes sizes dynamic one after the other, as it sees them vary, with a variant for each. Once any size varies,
    those of arguments that have not been passed yet are expected to vary too.
    """
    if (entries := _sizes_seen(root)) is None:
        return
    varied = [
        entry
        for name, entry in entries.items()
        if isinstance(entry.size, tuple) and (name in growing or pgo.auto_dynamic in entry.size)
    ]
    for entry in varied:
        entry.size = (pgo.auto_dynamic,) * len(entry.size)
    if varied:
        for name in set(_arguments(root)) - set(entries):
            entries[name].size = pgo.auto_dynamic


def _sizes_seen(root: Any) -> dict[str, Any] | None:
    """What torch has recorded about the sizes of each tensor of a function: which are static and which dynamic."""
    with_closure = "closure" in inspect.signature(pgo.CodeId.make).parameters  # of torch 2.13
    code = pgo.CodeId.make(root.f_code, root.closure) if with_closure else pgo.CodeId.make(root.f_code)
    state = pgo.get_code_state().get(code)
    return None if state is None else state.automatic_dynamic


def _arguments(root: Any) -> Iterator[str]:
    """torch's names for the arguments of a function, and of a `forward` to which it passes its keywords on."""
    code = root.f_code
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        yield f"L[{name!r}]"
    forward = getattr(type(root.f_locals.get("self")), "forward", None)
    if code.co_flags & inspect.CO_VARKEYWORDS and forward is not None:
        keywords = code.co_varnames[
            code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        ]
        for name in inspect.signature(forward).parameters:
            yield f"L[{keywords!r}][{name!r}]"


def _last_variant(function: _Function, count: int) -> str:
    differences = "; ".join(_differences(function)) or "no input tensor and no mode; TORCH_LOGS=recompiles says what"
    return (
        f"variant {count} of {function}, the last that torch compiles: for inputs of another kind it will run "
        f"uncompiled, tens of times slower. What differed: {differences}. Set "
        f"torch._dynamo.config.recompile_limit = {8 * count} before the first call, in each thread that calls it, or "
        "call it with fewer kinds of inputs"
    )


def _differences(function: _Function) -> list[str]:
    """A line for each group of inputs that differed between variants; inputs with the same history share a line."""
    variants, objects = function.variants, len(function.objects)
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(name for variant in variants for name in (*variant.shown, *variant.rest)):
        shown = [variant.shown.get(name, "none") for variant in variants]
        if any(name in variant.rest for variant in variants):
            shown = [variant.rest[name] for variant in variants if name in variant.rest]
        elif all(variant.sizes.get(name) == variants[0].sizes.get(name) for variant in variants):
            continue  # compiled for more sizes than it was called with
        if len(history := tuple(dict.fromkeys(shown))) > 1:
            alike.setdefault(history, []).append(name)
    lines = [
        _short(first) + (f" and {len(others)} others" if others else "") + ": " + ", ".join(history)
        for history, (first, *others) in alike.items()
    ]
    several = [f"self: {objects} of them"] if objects > 1 else []
    return several + lines[:_MOST_SHOWN] + ([f"{len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else [])


def _short(source: str) -> str:
    """`L['kwargs']['input_ids']` as `input_ids`."""
    return re.sub(r"\['(\w+)'\]", r".\1", source).removeprefix("L.").removeprefix("kwargs.")
