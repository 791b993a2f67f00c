"""What the layout operations are built on: sizes, digits, and what a change of axes does to a term."""

from __future__ import annotations

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from mla_compile.passes.algebra.sizes import Size, Unaligned, product, quotient, same, total
from mla_compile.passes.algebra.substitution import Pin, Slice, Split, change, change_read, overlapping, prune
from mla_compile.passes.algebra.terms import Axis, Digit, Form, Join, Product, Read, Segment, Term
from tests.drawn import UNHURRIED
from tests.passes.meaning import World

s, t = sympy.symbols("s t", positive=True, integer=True)

sizes = st.recursive(
    st.sampled_from([1, 2, 3, 4, 6, s, t]),
    lambda inner: st.builds(lambda a, b: a + b, inner, inner) | st.builds(lambda a, b: a * b, inner, inner),
    max_leaves=4,
)


@UNHURRIED
@given(a=sizes, b=sizes, values=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_a_quotient_times_its_divisor_is_the_dividend(a: Size, b: Size, values: tuple[int, int]) -> None:
    rest = quotient(a, b)
    if rest is not None:
        numbers = dict(zip((s, t), values, strict=True))
        assert sympy.sympify(rest * b - a).subs(numbers) == 0
        assert sympy.sympify(rest).subs(numbers).is_integer


@UNHURRIED
@given(a=sizes, b=sizes)
def test_a_product_is_divided_by_its_factor(a: Size, b: Size) -> None:
    rest = quotient(product([a, b]), b)
    assert rest is not None
    assert same(rest, a)


@pytest.mark.parametrize(("a", "b"), [(5, 2), (s, 2), (s, t), (s + 1, s), (4, 0), (s, 0), (2, 4)])
def test_a_quotient_that_is_not_whole_for_every_value_is_none(a: Size, b: Size) -> None:
    assert quotient(a, b) is None


def test_sizes_are_the_same_if_they_are_for_every_value() -> None:
    assert same(2 * (s + 1), 2 * s + 2)
    assert same(s * (t + 1), s * t + s)
    assert not same(s, t)
    assert not same(s, 2)


def test_a_sum_of_sizes_that_cancel_is_a_number() -> None:
    assert total([s, -s, 3]) == 3
    assert isinstance(total([s, -s, 3]), int)


def world() -> World:
    return World({"x": np.arange(24.0)}, {})


def test_a_split_axis_is_two_digits() -> None:
    axis, slow, fast = Axis(24), Axis(4), Axis(6)
    read = change_read(Read("x", ((Digit(axis, 24),),)), {axis: Split(slow, fast)})
    assert read.dims == ((Digit(slow, 4), Digit(fast, 6)),)
    world().check(Form(((slow,), (fast,)), Term(read)), np.arange(24.0).reshape(4, 6))


def test_a_split_falls_on_the_borders_of_a_slice_or_within_it() -> None:
    axis, slow, fast = Axis(12), Axis(2), Axis(6)
    aligned = change_read(Read("x", ((Digit(axis, 24, 6),),)), {axis: Split(slow, fast)})
    world().check(Form(((slow,), (fast,)), Term(aligned)), np.arange(6.0, 18).reshape(2, 6))
    within = change_read(Read("x", ((Digit(axis, 24, 5),),)), {axis: Split(slow, fast)})
    world().check(Form(((slow,), (fast,)), Term(within)), np.arange(5.0, 17).reshape(2, 6))
    assert not any(digit.whole for digit in within.dims[0][:1])


@pytest.mark.parametrize(("extent", "before", "after"), [(8, 0, 0), (7, 3, 0), (7, 1, 2)])
def test_a_split_of_the_slowest_of_several_digits_counts_what_is_left(extent: int, before: int, after: int) -> None:
    """A number of columns that no group has, as queries beside rope queries have."""
    axis, slow, fast, column = Axis(6), Axis(3), Axis(2), Axis(3)
    read = Read("x", ((Digit(axis, extent, 1, 1, before, after), Digit(column, 3)),))
    part = np.arange(24.0)[before + 3 :][:18]
    world().check(Form(((axis,), (column,)), Term(read)), part.reshape(6, 3))
    split = change_read(read, {axis: Split(slow, fast)})
    world().check(Form(((slow,), (fast,), (column,)), Term(split)), part.reshape(3, 2, 3))


def test_a_split_of_a_slice_with_a_step_or_of_one_of_several_digits_is_unaligned() -> None:
    axis, slow, fast = Axis(12), Axis(2), Axis(6)
    for digits in ((Digit(axis, 24, 0, 2),), (Digit(None, 2), Digit(axis, 24, 5))):
        with pytest.raises(Unaligned, match="does not split by 6"):
            change_read(Read("x", (digits,)), {axis: Split(slow, fast)})


def test_a_slice_of_what_was_split_within_a_dimension() -> None:
    axis, slow, fast, few, one = Axis(12), Axis(2), Axis(6), Axis(3), Axis(1)
    read = change_read(Read("x", ((Digit(axis, 24, 5),),)), {axis: Split(slow, fast)})
    part = change_read(read, {fast: Slice(few, 2)})
    world().check(Form(((slow,), (few,)), Term(part)), np.arange(5.0, 17).reshape(2, 6)[:, 2:5])
    part = change_read(read, {slow: Pin(1)})
    world().check(Form(((fast,),), Term(part)), np.arange(11.0, 17))
    part = change_read(read, {slow: Slice(one, 1)})
    world().check(Form(((fast,),), Term(change_read(part, {one: Pin(0)}))), np.arange(11.0, 17))


def test_slices_of_slices_add_up() -> None:
    whole, part, few = Axis(24), Axis(10), Axis(3)
    read = change_read(Read("x", ((Digit(whole, 24),),)), {whole: Slice(part, 2, 2)})
    world().check(Form(((part,),), Term(read)), np.arange(24.0)[2:22:2])
    read = change_read(read, {part: Slice(few, 1, 3)})
    world().check(Form(((few,),), Term(read)), np.arange(24.0)[2:22:2][1:10:3])
    world().check(Form((), Term(change_read(read, {few: Pin(2)}))), np.array(16.0))


def test_a_change_reaches_both_factors_of_a_product_and_what_it_sums_over() -> None:
    x, y = np.arange(12.0).reshape(3, 4), np.arange(20.0).reshape(4, 5)
    i, j, k, two, other = Axis(3), Axis(4), Axis(5), Axis(2), Axis(2)
    left = Term(Read("x", ((Digit(i, 3),), (Digit(j, 4),))))
    right = Term(Read("y", ((Digit(j, 4),), (Digit(k, 5),))))
    form = Form(((i,), (k,)), Term(Read("p", ((Digit(i, 3),), (Digit(k, 5),))), Product(left, right, (j,), 2.0)))
    here = World({"x": x, "y": y, "p": 2 * x @ y})
    here.check(form, 2 * x @ y)
    split = change(form, {j: Split(two, other), i: Slice(Axis(2), 1)})
    assert isinstance(split.term.parts, Product)
    assert split.term.parts.summed == (two, other)
    here.check(split, (2 * x @ y)[1:])


def joined() -> tuple[World, Form]:
    a, b = np.arange(8.0).reshape(2, 4), np.arange(10.0, 13)
    row, first, second, along = Axis(2), Axis(4), Axis(3), Axis(7)
    segments = (
        Segment((first,), Term(Read("a", ((Digit(row, 2),), (Digit(first, 4),))))),
        Segment((second,), Term(Read("b", ((Digit(second, 3),),)))),
    )
    array = np.concatenate([a, np.broadcast_to(b, (2, 3))], 1)
    read = Read("j", ((Digit(row, 2),), (Digit(along, 7),)))
    return World({"a": a, "b": b, "j": array}), Form(((row,), (along,)), Term(read, Join(along, segments)))


@pytest.mark.parametrize(("begin", "size"), [(begin, size) for size in range(2, 8) for begin in range(8 - size)])
def test_a_slice_of_a_join_keeps_the_pieces_that_it_reaches(begin: int, size: int) -> None:
    here, form = joined()
    axis = form.dims[1][0]
    here.check(change(form, {axis: Slice(Axis(size), begin)}), here.tensors["j"][:, begin : begin + size])


@pytest.mark.parametrize("index", range(7))
def test_one_index_of_a_join_lies_in_one_piece(index: int) -> None:
    here, form = joined()
    pinned = change(form, {form.dims[1][0]: Pin(index)})
    assert pinned.term.read.source == ("a" if index < 4 else "b")
    here.check(pinned, here.tensors["j"][:, [index]])


def test_what_does_not_follow_a_change_is_forgotten_and_the_read_still_holds() -> None:
    here, form = joined()
    strided = change(form, {form.dims[1][0]: Slice(Axis(3), 0, 3)})
    assert strided.term.parts is None
    here.check(strided, here.tensors["j"][:, ::3])


def test_pieces_of_symbolic_size_are_cut_only_where_their_order_is_known() -> None:
    first, second = Axis(s), Axis(t)
    segments = (Segment((first,), Term(Read("a", ()))), Segment((second,), Term(Read("b", ()))))
    assert [piece.size for piece in overlapping(segments, 0, s)] == [s]
    assert [piece.size for piece in overlapping(segments, s, t)] == [t]
    assert [piece.size for piece in overlapping(segments, 0, s + t)] == [s, t]
    assert [piece.size for piece in overlapping(segments, 1, s)] == [s - 1, 1]
    for begin, size in ((t, s), (0, t), (s, s)):
        with pytest.raises(Unaligned):
            overlapping(segments, begin, size)


def test_pruning_forgets_parts_below_the_depth_and_no_reads() -> None:
    _, form = joined()
    assert prune(form.term, 0) == Term(form.term.read)
    assert prune(form.term, 1) == form.term
