"""Retrace a rewritten graph with Inductor's decompositions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from ..dynamo.seal import unseal
from ..ops import SEALED
from .complex_parts import call_in_parts, has_complex, in_parts, wholes
from .int8_products import products_with_int8
from .same_numbers import merge_same_numbers
from .sizes_from_data import bmm_of_sizes_from_data
from .streamed_products import grouped_mm_of_few_rows, mm_of_one_row
from .widened_products import widened_addmm, widened_bmm, widened_grouped_mm, widened_mm

_OF_TORCH = {"aten", "prims", "higher_order", "inductor", "mkldnn", "sparse", "_test"}
_OF_TORCH |= {"c10d_functional", "quantized", "_quantized", "quantized_decomposed"}
"""Namespaces of torch's own ops in Inductor's table of decompositions."""


def decompositions_of_others() -> dict[Any, Callable[..., Any]]:
    """The decompositions in Inductor's table of ops that are not torch's: nothing else says what these compute."""
    return {op: of for op, of in select_decomp_table().items() if op.namespace not in _OF_TORCH}


def retrace(module: fx.GraphModule) -> fx.GraphModule:
    """Trace a rewritten graph again with Inductor's decompositions."""
    placeholders = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    inductors = select_decomp_table()
    aten, are_given = torch.ops.aten, _views_of(placeholders)
    interpreter, inductors_own = _WithTheirOrigins(module), products_with_int8(module.graph)
    mm = _first_that_can(mm_of_one_row, widened_mm, inductors[aten.mm.default])
    grouped_mm = _first_that_can(grouped_mm_of_few_rows, widened_grouped_mm)
    table: dict[Any, Callable[..., Any]] = {
        **inductors,
        SEALED: unseal,
        aten.mm.default: lambda *args: (
            inductors[aten.mm.default](*args) if interpreter.now in inductors_own else mm(*args)
        ),
        aten.addmm.default: _first_that_can(widened_addmm, inductors[aten.addmm.default]),
        aten.bmm.default: _first_that_can(
            bmm_of_sizes_from_data, inductors[aten.bmm.default], functools.partial(widened_bmm, are_given=are_given)
        ),
        aten._grouped_mm.default: grouped_mm,
    }
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):  # if imported: the same product for other dtypes
        table[torch.ops.transformers.grouped_mm_fallback.default] = grouped_mm
    mode = detect_fake_mode(placeholders)
    with torch._C._DisableAutocast(), torch.fx.traceback.preserve_node_meta(), mode or contextlib.nullcontext():
        retraced = make_fx(lambda *args: interpreter.run(*args), decomposition_table=table)(*placeholders)
    before, after = (m.graph.output_node() for m in (module, retraced))
    after.meta.update({k: v for k, v in before.meta.items() if k != "val"})
    retraced.meta.update(module.meta)
    unread = retraced.graph.eliminate_dead_code()  # casts of what a decomposition then left alone: another reader
    if merge_same_numbers(retraced.graph) or unread:
        retraced.recompile()
    return retraced


class _WithTheirOrigins(fx.Interpreter):
    """Give new nodes the origins that the interpreted nodes have.

    Comments in generated code then name nodes of Dynamo's graph, as they do without us, rather than nodes of the first
    trace. torch's own implementation would also copy each node's whole history, which took a seventh of the time.
    `now` is the node that is being traced.
    """

    now: fx.Node | None = None

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._complex = has_complex(module.graph)

    def run_node(self, n: fx.Node) -> Any:
        self.now = n
        return super().run_node(n)

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return in_parts(super().placeholder(target, args, kwargs))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = super().call_function
        return call_in_parts(call, target, args, kwargs) if self._complex else call(target, args, kwargs)

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().output(target, wholes(args), kwargs)

    @contextlib.contextmanager
    def _set_current_node(self, node: fx.Node) -> Iterator[None]:
        before = traceback.current_meta
        traceback.current_meta = node.meta.copy()  # tracing adds to it
        try:
            yield
        finally:
            traceback.current_meta = before


def _views_of(values: Iterable[Any]) -> Callable[[Tensor], bool]:
    """A predicate: is a tensor one of `values`, or a view of one?"""
    storages = {_storage(value) for value in values if isinstance(value, Tensor)}
    return lambda tensor: _storage(tensor) in storages


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _first_that_can(*decompositions: Callable[..., Any]) -> Callable[..., Any]:
    def decompose(*args: Any, **kwargs: Any) -> Any:
        results = (decomposition(*args, **kwargs) for decomposition in decompositions)
        return next((result for result in results if result is not NotImplemented), NotImplemented)

    return decompose
