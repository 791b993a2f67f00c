"""Write slices of a graph's inputs in place, where Inductor would go over the whole input instead.

Before   a = slice_scatter(view(input), x, 0, i, j);  b = slice_scatter(a, y, 0, k, l);  copy_(input, view(b))
After    a = index_put(input, positions of i to j, x);  b = index_put(a, positions of k to l, y);  copy_(input, b)

Inductor writes a single slice of an input in place, and anything that is written by index. For several slices, and
for several writes into a view of the input, it makes a copy, or a loop that writes every element of the input, new or
as it was: a step of decoding would read and write the whole cache.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, statically_known_true

from ..algebra.sizes import product, same
from ..code.splicing import emit
from ..nodes.arguments import INTEGERS, RESHAPES, argument, arguments, aten
from ..nodes.shapes import shape_of

_PARTS = (aten.slice_scatter.default, aten.select_scatter.default)
_WRITES = (*_PARTS, aten.index_put.default, aten.index_copy.default)


def write_in_place(graph: fx.Graph) -> None:
    """Replace chains of writes that end in a copy into an input by writes by index, into that input itself.

    A chain stays as it is if Inductor writes it in place already, or if the replacement is not proved to be the same.
    """
    for copy in [node for node in graph.nodes if node.target is aten.copy_.default]:
        target = arguments(copy)[0]
        chain = _chain(copy)
        writes = [write for node in chain if (write := _Write.of(node, target)) is not None]
        if not chain or len(writes) < len(chain):
            continue
        with contextlib.suppress(GuardOnDataDependentSymNode):  # changes made before it are right by themselves
            now = target
            for node, write in zip(chain, writes, strict=True):
                with graph.inserting_before(node):
                    now = emit(graph, write, [now, *write.sources], node)
                    written = emit(graph, _viewed, [now, arguments(node)[0]], node)
                node.replace_all_uses_with(written)
                graph.erase_node(node)
            copy.args = (target, now)


def _viewed(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.view(like.shape)


def _chain(copy: fx.Node) -> list[fx.Node]:
    """The writes between an input and the copy into it, in order; none if there is anything else, or if
    Inductor does them in place."""
    target, node = arguments(copy)[:2]
    writes, views = list[fx.Node](), False
    while isinstance(node, fx.Node) and node is not target:
        if node.target not in (*_WRITES, *RESHAPES):
            return []
        if node.target in RESHAPES:
            views = True
        else:
            writes.append(node)
        node = arguments(node)[0]
    if node is not target or target.op != "placeholder":
        return []
    if len(writes) == 1 and (not views or writes[0].target not in _PARTS):
        return []
    return writes[::-1] if views or any(write.target in _PARTS for write in writes) else []


@dataclass(frozen=True)
class _Write:
    """A write of `values` at positions in the first dimensions of a tensor.

    It is called with the tensor and the values of its sources. Parts that are written into parts are one write:
    `tensor[a, b:c] = values` and `tensor[a, indices] = values`.
    """

    values: fx.Node
    merged: int
    """How many of the tensor's first dimensions are one dimension in the view that is written."""
    selected: tuple[Any, ...]
    """The position in each of the first dimensions that are selected, ints or nodes."""
    dim: int = 0
    start: Any = None
    """Where the written slice of dimension `dim`, in what is left, starts; None if that is written whole, or by
    index."""
    indices: tuple[fx.Node, ...] = ()

    @classmethod
    def of(cls, write: fx.Node, target: fx.Node) -> _Write | None:
        """What a node writes into a view of `target`; None if it does anything else."""
        now, selected = arguments(write)[0], list[Any]()
        merged = _merged(now, target)
        if merged is None or write.meta["val"].dtype != target.meta["val"].dtype:
            return None
        while write.target is aten.select_scatter.default:
            inner, dim, index = arguments(write)[1:4]
            if dim != 0 or not _from_the_front(index):
                return None
            selected.append(index)
            if inner.target not in _WRITES or len(inner.users) > 1 or not _selects(arguments(inner)[0], now, index):
                return cls(inner, merged, tuple(selected))
            now, write = arguments(inner)[0], inner
        match write.target:
            case aten.slice_scatter.default:
                dim, start = argument(write, "dim"), argument(write, "start") or 0
                if argument(write, "step") == 1 and _from_the_front(start):
                    dim %= now.meta["val"].dim()
                    return cls(arguments(write)[1], merged, tuple(selected), dim, start)
            case aten.index_put.default:
                indices, values = arguments(write)[1:3]
                if all(map(_is_index, indices)) and not argument(write, "accumulate"):
                    return cls(values, merged, tuple(selected), indices=tuple(indices))
            case aten.index_copy.default:
                dim, index, values = arguments(write)[1:4]
                if dim == 0 and _is_index(index) and index.meta["val"].dim() == 1:
                    return cls(values, merged, tuple(selected), indices=(index,))
        return None

    @property
    def sources(self) -> list[fx.Node]:
        numbers = [number for number in (*self.selected, self.start) if isinstance(number, fx.Node)]
        return list(dict.fromkeys([self.values, *self.indices, *numbers]))

    def __call__(self, tensor: Tensor, *given: Any) -> Tensor:
        known = dict(zip(self.sources, given, strict=True))
        values = known[self.values]
        indices = [torch.full((), known.get(number, number), device=tensor.device) for number in self.selected]
        indices += [known[index] for index in self.indices]
        for dim in range(self.dim + 1) if self.start is not None else ():
            position = torch.arange(values.shape[dim], device=tensor.device).view(-1, *[1] * (self.dim - dim))
            indices.append(position + known.get(self.start, self.start) if dim == self.dim else position)
        written: Tensor = tensor.index_put((*self._apart(indices[0], tensor), *indices[1:]), values)
        return written

    def _apart(self, first: Tensor, tensor: Tensor) -> list[Tensor]:
        """Positions in the dimensions that the view merges, given those in the merged dimension."""
        if self.merged > 1:
            count: Any = 1  # int or SymInt
            for size in tensor.shape[: self.merged]:
                count = count * size
            first = torch.where(first < 0, first + count, first)
        apart = list[Tensor]()
        for size in tensor.shape[1 : self.merged][::-1]:
            apart.append(first % size)
            first = first // size
        return [first, *apart[::-1]]


def _merged(base: fx.Node, target: fx.Node) -> int | None:
    """How many of the first dimensions of `target` are one dimension in its view `base`, with all others the same."""
    view, whole = shape_of(base), shape_of(target)
    count = len(whole) - len(view) + 1
    if count < 1 or not view:
        return None
    alike = [(view[0], product(whole[:count])), *zip(view[1:], whole[count:], strict=True)]
    return count if all(same(*sizes) for sizes in alike) else None


def _from_the_front(number: Any) -> bool:
    """Whether a position provably counts from the front."""
    return statically_known_true((number.meta["val"] if isinstance(number, fx.Node) else number) >= 0)


def _is_index(index: Any) -> bool:
    return isinstance(index, fx.Node) and index.meta["val"].dtype in INTEGERS


def _selects(node: Any, source: fx.Node, index: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.select.int and arguments(node)[:3] == (source, 0, index)
