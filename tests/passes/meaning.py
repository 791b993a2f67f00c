"""What a `Form` says a tensor is, worked out element by element: the oracle of the tests of the axis algebra."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np
import sympy
import torch
from torch import Tensor, fx

from mla_compile.passes.algebra.gathers import lookup_of
from mla_compile.passes.algebra.sizes import Size, same
from mla_compile.passes.algebra.terms import (
    Axis,
    Bits,
    Constant,
    Form,
    Join,
    Joined,
    Laid,
    Lookup,
    Product,
    Read,
    Scaled,
    Stacked,
    Sum,
    Term,
    Undefined,
    Zero,
)
from mla_compile.passes.nodes.arguments import is_tensor
from mla_compile.passes.trace.trace import Trace
from tests.passes.graphs import values

Grid = np.ndarray
"""An axis's index at every element, broadcastable to all the axes in play."""


@dataclass
class World:
    """The values of the tensors that forms read, and of the symbols in their sizes."""

    tensors: dict[Hashable, np.ndarray] = field(default_factory=dict)
    symbols: dict[sympy.Symbol, int] = field(default_factory=dict)

    def number(self, size: Size) -> int:
        """A size at the symbols' values."""
        return int(size) if isinstance(size, int) else int(sympy.sympify(size).subs(self.symbols))

    def check(self, form: Form, actual: np.ndarray) -> None:
        """Assert that a form is right: its shape, and every element, both by its read and put together from its parts.

        NaN in `actual` is memory that was never written: there the form may say anything.
        """
        assert tuple(self.number(size) for size in form.shape) == actual.shape
        axes = [axis for dim in form.dims for axis in dim]
        assert len(axes) == len(set(axes)), "one axis in two places"
        assert not any(same(axis.size, 1) for axis in axes), "an axis of size 1"
        assert form.term.axes | form.term.read.axes <= set(axes), "an axis that no dimension has"
        if not actual.size:
            return
        grids = self.grids(form)
        for value, how in ((self.read(form.term.read, grids), "read"), (self.term(form.term, grids), "parts")):
            assert np.all((self.element(form, value) == actual) | np.isnan(actual)), f"wrong by its {how}"

    def grids(self, form: Form) -> dict[Axis, Grid]:
        axes = [axis for dim in form.dims for axis in dim]
        sizes = [self.number(axis.size) for axis in axes]
        return dict(zip(axes, np.indices(sizes, sparse=True), strict=True))

    def element(self, form: Form, value: np.ndarray) -> np.ndarray:
        sizes = [self.number(axis.size) for dim in form.dims for axis in dim]
        return np.broadcast_to(value, sizes).reshape([self.number(size) for size in form.shape])

    def read(self, read: Read, grids: Mapping[Axis, Grid]) -> np.ndarray:
        """The elements that a read names. Asserts that every index is within the tensor."""
        made = isinstance(read.source, Constant | Joined | Laid | Scaled | Stacked)
        tensor = self._made(read.source) if made else self.tensors[read.source]
        assert len(read.dims) == tensor.ndim
        indices = []
        for dim, size in zip(read.dims, tensor.shape, strict=True):
            index, extent = np.zeros((1,) * len(next(iter(grids.values())).shape) if grids else (), dtype=int), 1
            for digit in dim:
                own = self.number(digit.extent)
                place = self.number(digit.start)
                if digit.axis is not None:
                    place = place + digit.step * grids[digit.axis]
                assert np.all((place >= 0) & (place < own)), f"an index beyond its digit of {own}"
                index, extent = index * own + place, extent * own
            before, after = (self.number(n) for n in (dim[0].before, dim[0].after)) if dim else (0, 0)
            assert before + extent + after == size, f"digits of {extent} for a dimension of {size}"
            indices.append(before + index)
        elements = tensor[tuple(indices)] if indices else tensor
        for step in read.then:  # a cast to another dtype rounds nothing here
            if isinstance(step, float):
                elements = elements * step
            elif isinstance(step, Bits):
                elements = torch.from_numpy(elements.astype(np.uint8)).view(step.dtype).double().numpy()
        return elements

    def _made(self, source: Constant | Joined | Laid | Scaled | Stacked) -> np.ndarray:
        """The elements of a source that is not a tensor of the graph."""
        if isinstance(source, Constant):
            return np.full([self.number(axis.size) for axis in source.axes], source.number)
        if isinstance(source, Laid):
            whole = Form((source.parts, *((axis,) for axis in source.others)), Term(source.of))
            return self.element(whole, self.read(source.of, self.grids(whole)))
        if isinstance(source, Joined):
            pieces = []
            for piece, along in zip(source.pieces, source.along, strict=True):
                whole = Form((along, *((axis,) for axis in source.axes)), Term(piece))
                pieces.append(self.element(whole, self.read(piece, self.grids(whole))))
            return np.concatenate(pieces)
        of, *_ = source.pieces if isinstance(source, Stacked) else (source.of,)
        whole = Form(tuple((axis,) for axis in source.axes), Term(of))
        grids = self.grids(whole)
        if isinstance(source, Stacked):
            return np.stack([self.element(whole, self.read(piece, grids)) for piece in source.pieces])
        return self.element(whole, self.read(source.of, grids) * self.read(source.by, grids))

    def term(self, term: Term, grids: Mapping[Axis, Grid]) -> np.ndarray:
        """The elements of a term, computed from its parts; a term without parts is read."""
        match term.parts:
            case Product(left, right, summed, scale):
                inner = {axis: grid[(..., *(None,) * len(summed))] for axis, grid in grids.items()}
                rank = len(next(iter(grids.values())).shape) if grids else 0
                own = np.indices([self.number(axis.size) for axis in summed], sparse=True) if summed else ()
                inner |= {axis: grid[(None,) * rank] for axis, grid in zip(summed, own, strict=True)}
                sizes = [self.number(axis.size) for axis in summed]
                terms = self.term(left, inner) * self.term(right, inner)
                terms = np.broadcast_to(terms, np.broadcast_shapes(terms.shape, (*(1,) * rank, *sizes)))
                return scale * terms.sum(tuple(range(rank, rank + len(summed))))
            case Sum(terms):
                return sum(self.term(addend, grids) for addend in terms)
            case Zero():
                return np.array(0.0)
            case Join(axis, segments):
                return self._join(Join(axis, segments), grids)
            case Undefined():
                return np.array(np.nan)
        return self.read(term.read, grids)

    def _join(self, join: Join, grids: Mapping[Axis, Grid]) -> np.ndarray:
        index = grids[join.axis]
        pieces, start = [], 0
        for segment in join.segments:
            size = self.number(segment.size)
            local = np.clip(index - start, 0, max(size - 1, 0))
            inside = (index >= start) & (index < start + size)
            start += size
            if size == 0:
                continue
            own = {}
            for axis in segment.axes[::-1]:
                local, own[axis] = np.divmod(local, self.number(axis.size))
            pieces.append((inside, self.term(segment.term, {**grids, **own})))
        assert start == self.number(join.axis.size), f"pieces of {start} along an axis of {join.axis.size}"
        if not pieces:
            return np.array(np.nan)
        return np.select([inside for inside, _ in pieces], [value for _, value in pieces], np.nan)


def check_lookups(module: fx.GraphModule, *tensors: Tensor) -> dict[fx.Node, Lookup]:
    """Assert that what the trace says of each lookup of a graph is right, element by element. Returns the lookups."""
    trace, results = Trace(module.graph), values(module, *tensors)
    world = World({node: value.double().numpy() for node, value in results.items() if is_tensor(node)})
    lookups: dict[fx.Node, Lookup] = {}
    for node in filter(is_tensor, module.graph.nodes):
        form = trace[node]
        lookup = lookup_of(form.term)
        if lookup is None:
            continue
        lookups[node] = lookup
        world.check(form, world.tensors[node])
        grids = world.grids(form)
        if lookup.flat is not None:
            keys = grids[lookup.flat.keys]
            size = world.number(lookup.flat.row.size)
            grids |= {lookup.flat.page: keys // size, lookup.flat.row: keys % size}
        entry = world.read(lookup.table, grids).astype(int)
        entry = np.where(lookup.wraps & (entry < 0), entry + world.number(lookup.entry.size), entry)
        grids |= {lookup.entry: entry}
        found = world.read(lookup.pages, grids)
        if lookup.scales is not None:
            found = found * world.read(lookup.scales, grids)
        found = found * math.prod(step for step in lookup.then if isinstance(step, float))
        assert np.all(world.element(form, found) == world.tensors[node])
    return lookups
