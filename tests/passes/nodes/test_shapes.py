"""Sizes take the equations of guards into account, in the symbols that torch has kept."""

import pytest
import sympy
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    sym_and,
    sym_or,
)

from mla_compile.passes.algebra.sizes import same
from mla_compile.passes.nodes.shapes import size_of
from tests.passes.graphs import capture, rewrite
from tests.passes.spellings import L, N, P, R, V


def test_an_equation_that_torch_has_solved_is_not_solved_otherwise():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    sizes = [mode.from_tensor(torch.zeros(n), symbolic_context=context).shape[0] for n in (11, 11, 8, 8, 3, 3)]
    past, new, mask = next(  # torch replaces `mask`, by name the first of the three, by the sum
        (a, b, c) for c in sizes[:2] for a in sizes[2:4] for b in sizes[4:] if str(c) == min(map(str, (a, b, c)))
    )
    before = [size_of(n) for n in (past, new)]
    assert mask == past + new  # a guard
    assert same(size_of(mask), size_of(past + new))
    for size, earlier in zip((past, new), before, strict=True):
        assert same(size_of(size), sympy.sympify(size.node.expr))
        assert same(earlier, size_of(size))


def three_sizes():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    return [mode.from_tensor(torch.zeros(8), symbolic_context=context).shape[0] for _ in range(3)]


def test_all_equations_of_one_guard_hold():
    a, b, c = three_sizes()
    assert sym_and(a == c, b == c)  # a guard, for which torch replaces one of the symbols
    assert same(size_of(a), size_of(b))
    assert same(size_of(b), size_of(c))


def test_one_of_two_equations_may_not_hold():
    a, b, c = three_sizes()
    assert sym_or(a == c, b == c)  # a guard
    assert len({size_of(size) for size in (a, b, c)}) == 3


def in_halves(size):
    return size // 2 * (size // (size // 2))


def test_an_expression_that_a_guard_compares_with_a_size_is_that_size():
    a, b, c = three_sizes()
    for equal in (in_halves(a) == a, in_halves(b) == b, in_halves(a) == in_halves(b)):
        assert equal  # a guard
    assert same(size_of(in_halves(a)), size_of(a))
    assert same(size_of(a), size_of(b))
    assert not same(size_of(in_halves(c)), size_of(c))
    assert in_halves(b) == 8  # a guard
    assert [size_of(size) for size in (a, b, in_halves(a))] == [8, 8, 8]
    assert not same(size_of(c), 8)


def test_an_expression_is_known_where_its_symbols_are_not():
    a, b, _ = three_sizes()
    assert a // 3 == 2  # a guard, which holds for 6, 7 and 8
    assert size_of(a // 3) == 2
    assert same(size_of(a // 3 * b), size_of(b + b))
    for size in (a, a // 2, (a + 1) // 3, b // 3):
        assert size_of(size) == size.node.expr


def test_an_expression_is_known_by_a_sum_with_it():
    a, b, c = three_sizes()
    assert a // 8 + 1 == 2  # a guard, as of pages for one more token
    assert size_of(a // 8) == 1
    assert size_of(4 * (a // 8) + 4) == 8
    assert 6 * (b // 8) + 6 == 12  # a guard
    assert size_of(b // 8) == 1
    assert 2 * (c // 4) + 3 * (c // 3) == 10  # a guard that gives neither quotient
    assert not same(size_of(c // 4), 2)
    assert not same(size_of(c // 3), 2)


def test_an_expression_that_may_be_a_size_is_another():
    a, b, _ = three_sizes()
    assert sym_or(a // 3 == 2, a // 3 == b)  # a guard
    assert size_of(a // 3) == (a // 3).node.expr


@pytest.fixture
def sizes():
    module = capture(torch.neg, torch.zeros(5, 7), symbolic=[[0, 1]])
    return next(iter(module.graph.nodes)).meta["val"].shape


def test_a_quotient_without_rest_is_no_floor(sizes):
    a, b = sizes
    assert same(size_of(a * a * b // a), size_of(a * b))
    assert same(size_of((a + 1) * b // b), size_of(a + 1))


def test_another_quotient_stays_one(sizes):
    a, b = sizes
    for size in (a // 2, a * b // (b + 1), (a + 1) // a):
        assert size_of(size) == size.node.expr


def test_as_many_pages_as_sequences():
    """torch has one symbol for pages per sequence and for sequences, and a quotient for the keys of a sequence."""

    def attention(pages, table, x, w_q, w_kv):
        cache = pages[table].flatten(1, 2)
        batch = table.shape[0]
        kv = cache[..., :L].flatten(0, 1) @ w_kv
        kv = kv.view(batch, kv.shape[0] // batch, N, P + V).transpose(1, 2)
        q = (x @ w_q).view(batch, -1, N, P + R).transpose(1, 2)
        rope = cache[:, None, :, L:].expand(-1, N, -1, -1)
        return torch.softmax(q @ torch.cat([kv[..., :P], rope], -1).mT, -1) @ kv[..., P:]

    shapes = (9, 4, L + R), (3, 3), (3, 1, 16), (16, N * (P + R)), (L, N * (P + V))
    pages, table, *rest = (torch.rand(shape).double() for shape in shapes)
    module = capture(attention, pages, (table * 9).long(), *rest, symbolic=[[0, 1], [0, 1], [0]])
    (outcome,) = rewrite(module)
    assert outcome.rewritten, outcome.reason
