"""Whatever layout operations and products a tensor comes from, its form says what its elements are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_compile.passes.algebra import elementwise, joins, operations
from mla_compile.passes.algebra.sizes import Size, Unaligned, quotient, same
from mla_compile.passes.algebra.terms import Form, Laid, Product, Term, Undefined
from tests.drawn import UNHURRIED
from tests.passes.meaning import World

from .worlds import numbers, world_of

S = sympy.symbols("s0 s1 s2", positive=True, integer=True)

Made = tuple[Callable[[], Form], np.ndarray, Sequence[Size]] | None
"""How to make a form, the array that it has to describe, and its shape."""


class Chain:
    """Tensors, each as a form and as an array, and random operations on both. Every result is checked right away."""

    def __init__(self, draw: st.DrawFn, symbolic: bool) -> None:
        self.draw = draw
        self.world = World(symbols={s: draw(st.integers(2, 4)) for s in S} if symbolic else {})
        self.tensors: list[tuple[Form, np.ndarray]] = []
        for _ in range(2):
            self.leaf([self.size() for _ in range(draw(st.integers(1, 3)))])

    def size(self) -> Size:
        symbols = list(self.world.symbols)[:2]
        return self.draw(st.sampled_from([2, 2, 3, 3, 4, 6, 1, *symbols, *symbols, 0]))

    def add(self, name: object, form: Form, array: np.ndarray) -> tuple[Form, np.ndarray]:
        self.world.tensors.setdefault(name, array)
        self.world.check(form, array)
        self.tensors.append((form, array))
        return form, array

    def leaf(self, shape: list[Size]) -> tuple[Form, np.ndarray]:
        name = f"leaf {len(self.tensors)}"
        sizes = [self.world.number(size) for size in shape]
        array = np.random.default_rng(len(self.tensors)).integers(-3, 4, sizes).astype(float)
        return self.add(name, operations.leaf(name, shape), array)

    def any(self, ranks: Sequence[int] = (1, 2, 3, 4)) -> tuple[Form, np.ndarray]:
        fitting = [(form, array) for form, array in self.tensors if array.ndim in ranks]
        return self.draw(st.sampled_from(fitting)) if fitting else self.leaf([self.size() for _ in range(ranks[-1])])

    def step(self) -> None:
        kinds = (self.view, self.permute, self.take, self.select, self.expand, self.repeat, self.join)
        kinds += (self.contract, self.pointwise, self.scaled, self.cast, self.written)
        kind = self.draw(st.sampled_from([*kinds, self.view, self.take, self.join, self.contract, self.contract]))
        name = f"{kind.__name__} {len(self.tensors)}"
        made = kind(name)
        if made is None:
            return  # the drawn operation does not apply to the drawn tensor
        form, array, shape = made
        if array.size > 300:
            return
        self.world.tensors[name] = array
        try:
            described = form()
        except Unaligned:
            described = operations.leaf(name, shape)
        self.add(name, described, array)

    def view(self, name: str) -> Made:
        form, array = self.any()
        shape = list(form.shape)
        kind = self.draw(st.sampled_from(["merge", "split", "unsqueeze", "squeeze", "any"]))
        i = self.draw(st.integers(0, max(len(shape) - 1, 0)))
        if kind == "merge" and len(shape) > 1:
            i = min(i, len(shape) - 2)
            shape[i : i + 2] = [
                sympy.expand(shape[i] * shape[i + 1]) if self.world.symbols else shape[i] * shape[i + 1]
            ]
        elif kind == "split" and shape:
            divisors = [d for d in (2, 3, 4, *self.world.symbols) if quotient(shape[i], d) is not None]
            if not divisors:
                return None
            divisor = self.draw(st.sampled_from(divisors))
            pair = [divisor, quotient(shape[i], divisor)]
            shape[i : i + 1] = pair if self.draw(st.booleans()) else pair[::-1]
        elif kind == "unsqueeze":
            shape.insert(i, 1)
        elif kind == "squeeze":
            shape = [size for size in shape if not same(size, 1)]
        elif not self.world.symbols and array.size:
            rest, shape = array.size, []
            while rest > 1:
                shape.append(self.draw(st.sampled_from([d for d in range(2, rest + 1) if rest % d == 0])))
                rest //= shape[-1]
        return lambda: operations.view(form, shape), array.reshape([self.world.number(s) for s in shape]), shape

    def permute(self, name: str) -> Made:
        form, array = self.any()
        order = self.draw(st.permutations(range(array.ndim)))
        return lambda: operations.permute(form, order), array.transpose(order), [form.shape[i] for i in order]

    def range(self, size: Size) -> tuple[Size, Size, int]:
        """The start, size and step of a random slice of a dimension of `size`."""
        whole = self.world.number(size)
        known: list[Size] = [*range(whole + 1), *(s for s, value in self.world.symbols.items() if value <= whole)]
        start = self.draw(st.sampled_from(known))
        begin = self.world.number(start)
        step = self.draw(st.sampled_from([1, 1, 1, 2, 3]))
        if step == 1 and self.draw(st.booleans()):
            return start, _plain(size - start), 1
        counts: list[Size] = [*range(-(-(whole - begin) // step) + 1)]
        counts += [s for s, value in self.world.symbols.items() if value <= counts[-1]]
        return start, self.draw(st.sampled_from(counts)), step

    def take(self, name: str) -> Made:
        form, array = self.any()
        dim = self.draw(st.integers(0, array.ndim - 1))
        start, size, step = self.range(form.shape[dim])
        begin, count = self.world.number(start), self.world.number(size)
        index = (slice(None),) * dim + (slice(begin, begin + count * step, step),)
        shape = (*form.shape[:dim], size, *form.shape[dim + 1 :])
        return lambda: operations.take(form, dim, start, size, step), array[index], shape

    def select(self, name: str) -> Made:
        form, array = self.any()
        if 0 in array.shape:
            return None
        dim = self.draw(st.integers(0, array.ndim - 1))
        index = self.draw(st.integers(0, array.shape[dim] - 1))
        shape = (*form.shape[:dim], *form.shape[dim + 1 :])
        return lambda: operations.select(form, dim, index), array.take(index, dim), shape

    def expand(self, name: str) -> Made:
        form, array = self.any((1, 2, 3))
        new = [self.size() for _ in range(self.draw(st.integers(0, 1)))]
        shape = [*new, *(self.size() if same(size, 1) else size for size in form.shape)]
        return lambda: operations.expand(form, shape), np.broadcast_to(array, [*map(self.world.number, shape)]), shape

    def repeat(self, name: str) -> Made:
        form, array = self.any((1, 2, 3))
        counts = [self.draw(st.sampled_from([1, 1, 2, 3])) for _ in range(array.ndim + self.draw(st.integers(0, 1)))]
        shape = [_plain(c * s) for c, s in zip(counts, [1] * (len(counts) - array.ndim) + [*form.shape], strict=True)]
        return lambda: operations.repeat(form, counts), np.tile(array, counts), shape

    def join(self, name: str) -> Made:
        form, array = self.any()
        dim = self.draw(st.integers(0, array.ndim - 1))
        pieces = [(form, array)]
        for _ in range(self.draw(st.integers(1, 2))):
            shape = list(form.shape)
            shape[dim] = self.size()
            rest = [i for i in range(array.ndim) if i != dim]
            fitting = [
                (f, a)
                for f, a in self.tensors
                if a.ndim == array.ndim and all(same(f.shape[i], form.shape[i]) for i in rest)
            ]
            if self.draw(st.booleans()):
                fitting = [self.leaf(shape)]
            elif rest and self.draw(st.booleans()):
                repeated = self.draw(st.sampled_from(rest))
                small, values = self.leaf([1 if i == repeated else s for i, s in enumerate(shape)])
                wide = np.broadcast_to(values, [self.world.number(s) for s in shape])
                fitting = [self.add(None, operations.expand(small, shape), wide)]
            pieces.insert(self.draw(st.integers(0, len(pieces))), self.draw(st.sampled_from(fitting)))
        shape = list(form.shape)
        shape[dim] = _plain(sum(f.shape[dim] for f, _ in pieces))
        forms = [f for f, _ in pieces]
        return lambda: joins.join(name, forms, dim), np.concatenate([a for _, a in pieces], dim), shape

    def contract(self, name: str) -> Made:
        left, a = self.any((3, 2))
        fitting = [(f, v) for f, v in self.tensors if v.ndim == a.ndim and same(f.shape[-2], left.shape[-1])]
        fitting += [
            (operations.permute(f, (*range(a.ndim - 2), a.ndim - 1, a.ndim - 2)), v.swapaxes(-1, -2))
            for f, v in self.tensors
            if v.ndim == a.ndim and same(f.shape[-1], left.shape[-1])
        ]
        if a.ndim == 3:
            fitting = [(f, v) for f, v in fitting if same(f.shape[0], left.shape[0])]
        fitting.append(self.leaf([*left.shape[:-2], left.shape[-1], self.size()]))
        right, b = self.draw(st.sampled_from(fitting))
        batch = [(0, 0)] if a.ndim == 3 else []
        shape = (*left.shape[:-1], right.shape[-1])
        summed = (a.ndim - 1, a.ndim - 2)
        return lambda: operations.contract(name, left, right, batch, summed), a @ b, shape

    def pointwise(self, name: str) -> Made:
        form, a = self.any()
        fitting = [(form, a), (operations.permute(form, range(a.ndim)[::-1]), a.T)]
        fitting += [self.leaf([size if self.draw(st.booleans()) else 1 for size in form.shape]), *self.tensors]
        other, b = self.draw(st.sampled_from(fitting))
        pairs = list(zip(form.shape[::-1], other.shape[::-1], strict=False))
        if not all(same(i, j) or same(i, 1) or same(j, 1) for i, j in pairs):
            return None
        longer = form.shape if a.ndim >= b.ndim else other.shape
        shape = [*longer[: len(longer) - len(pairs)], *(j if same(i, 1) else i for i, j in pairs[::-1])]
        return lambda: elementwise.pointwise(name, [form, other], shape), a + 2 * b, shape

    def scaled(self, name: str) -> Made:
        form, array = self.any()
        factor = self.draw(st.sampled_from([0.5, 3.0, -1.0]))
        return lambda: operations.scaled(form, factor), factor * array, form.shape

    def cast(self, name: str) -> Made:
        form, array = self.any()
        return lambda: operations.cast(form, "half"), array, form.shape

    def written(self, name: str) -> Made:
        """Memory that was never written."""
        shape = [self.size() for _ in range(self.draw(st.integers(1, 3)))]
        form = operations.leaf(name, shape)
        array = np.full([self.world.number(size) for size in shape], np.nan)
        return lambda: Form(form.dims, Term(form.term.read, Undefined())), array, shape


def _plain(size: Size) -> Size:
    size = sympy.expand(size)
    return int(size) if size.is_Integer else size


@pytest.mark.parametrize("symbolic", [False, True], ids=["numbers", "symbols"])
@settings(UNHURRIED, max_examples=100)
@given(data=st.data())
def test_the_form_of_any_chain_of_operations_is_right(symbolic: bool, data: st.DataObject) -> None:
    chain = Chain(data.draw, symbolic)
    for _ in range(data.draw(st.integers(1, 8))):
        chain.step()


def test_a_tensor_times_its_own_transpose_keeps_rows_and_columns_apart() -> None:
    x = numbers(4, 4)
    world, (form,) = world_of(x=x)
    world.tensors |= {"gram": x @ x.T, "sum": x + x.T}
    world.check(operations.contract("gram", form, operations.permute(form, (1, 0)), [], (1, 0)), x @ x.T)
    world.check(elementwise.pointwise("sum", [form, operations.permute(form, (1, 0))], (4, 4)), x + x.T)


def test_elements_repeat_along_the_factors_along_which_all_operands_do() -> None:
    x, y = numbers(12), numbers(2)
    world, (sliced, halves) = world_of(x=x, y=y)
    repeated = operations.view(operations.expand(operations.view(halves, (2, 1)), (2, 4)), (8,))
    world.tensors |= {"sum": x[1:9] + 2 * np.repeat(y, 4), "twice": 3 * np.repeat(y, 4)}
    both = elementwise.pointwise("sum", [operations.take(sliced, 0, 1, 8), repeated], (8,))
    world.check(both, world.tensors["sum"])
    assert len(both.term.axes) == 1
    twice = elementwise.pointwise("twice", [repeated, repeated], (8,))
    world.check(twice, world.tensors["twice"])
    assert [axis.size for axis in twice.term.axes] == [2]


def test_a_tensor_times_a_product_of_itself_does_not_mix_summed_and_free_axes() -> None:
    x, m = numbers(3, 4), numbers(4, 4)
    world, (left, right) = world_of(x=x, m=m)
    world.tensors |= {"p": x @ m, "s": x @ (x @ m).T, "t": x.T @ (x @ m)}
    inner = operations.contract("p", left, right, [], (1, 0))
    world.check(operations.contract("s", left, operations.permute(inner, (1, 0)), [], (1, 0)), x @ (x @ m).T)
    outer = operations.contract("t", operations.permute(left, (1, 0)), inner, [], (1, 0))
    world.check(operations.select(outer, 0, 1), (x.T @ (x @ m))[1])
    world.check(operations.take(outer, 0, 1, 2), (x.T @ (x @ m))[1:3])


def test_a_product_keeps_its_factors_through_views_slices_and_scales() -> None:
    latent, weight = numbers(5, 3), numbers(3, 12)
    world, (left, right) = world_of(latent=latent, weight=weight)
    world.tensors |= {"kv": latent @ weight, "scaled": 0.5 * (latent @ weight)}
    form = operations.scaled(operations.contract("kv", left, right, [], (1, 0)), 0.5)
    form = operations.permute(operations.view(form, (5, 2, 6)), (1, 0, 2))
    form = operations.take(form, 2, 2, 3)
    assert isinstance(form.term.parts, Product)
    world.check(form, 0.5 * (latent @ weight).reshape(5, 2, 6).transpose(1, 0, 2)[..., 2:5])


@pytest.mark.parametrize("shape", [(4, 6), (2, 2, 6), (24,), (2, 12), (1, 4, 1, 6)])
def test_a_view_that_factors_is_a_read(shape: tuple[int, ...]) -> None:
    x = numbers(4, 6)
    world, (form,) = world_of(x=x)
    world.check(operations.view(form, shape), x.reshape(shape))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((3, 8), "do not provably divide"),
        ((4, 5), "do not provably divide"),
        ((4, 3), "more elements"),
        ((4, 6, 2), "no axis left"),
    ],
)
def test_a_view_that_does_not_factor_is_unaligned(shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(Unaligned, match=reason):
        operations.view(operations.leaf("x", (4, 6)), shape)


def test_a_slice_that_cuts_a_merged_dimension_between_borders_is_of_a_tensor_that_lies_so() -> None:
    x = numbers(4, 6)
    world, (form,) = world_of(x=x)
    across = operations.view(operations.permute(form, (1, 0)), (24,))
    one, other = operations.take(across, 0, 5, 12), operations.take(across, 0, 5, 12)
    assert isinstance(one.term.read.source, Laid)
    assert one.term.read.source == other.term.read.source
    world.check(one, x.T.flatten()[5:17])
    world.check(operations.view(one, (3, 4)), x.T.flatten()[5:17].reshape(3, 4))


def test_what_lies_so_already_is_read_where_it_is() -> None:
    x = numbers(24)
    world, (form,) = world_of(x=x)
    merged = operations.view(operations.view(form, (4, 6)), (24,))
    taken = operations.take(merged, 0, 5, 12)
    assert taken.term.read.source == "x"
    world.check(taken, x[5:17])


@pytest.mark.parametrize(("start", "size"), [(7, 1), (7, 4), (12, 5)])
def test_a_slice_within_one_index_of_a_merged_dimension_is_read_where_it_is(start: int, size: int) -> None:
    x = numbers(4, 6)
    world, (form,) = world_of(x=x)
    world.check(operations.take(operations.view(form, (24,)), 0, start, size), x.flatten()[start : start + size])
