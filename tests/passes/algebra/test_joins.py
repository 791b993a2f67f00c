"""Concatenated tensors: what their elements are, and which tensors they are read from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import sympy

from mla_compile.passes.algebra import joins, operations
from mla_compile.passes.algebra.sizes import Unaligned
from mla_compile.passes.algebra.terms import Join, Product

from .worlds import numbers, world_of


def test_a_join_gives_a_piece_back_whole() -> None:
    latent, weight, rope = numbers(5, 3), numbers(3, 4), numbers(5, 2)
    world, forms = world_of(latent=latent, weight=weight, rope=rope)
    world.tensors |= {"nope": latent @ weight, "key": np.concatenate([latent @ weight, rope], 1)}
    nope = operations.contract("nope", forms[0], forms[1], [], (1, 0))
    key = joins.join("key", [nope, forms[2]], 1)
    assert isinstance(key.term.parts, Join)
    first, second = operations.take(key, 1, 0, 4), operations.take(key, 1, 4, 2)
    assert isinstance(first.term.parts, Product)
    assert second.term.read.source == "rope"
    world.check(first, latent @ weight)
    world.check(second, rope)
    world.check(operations.take(key, 1, 3, 2), world.tensors["key"][:, 3:5])
    world.check(operations.select(key, 1, 3), world.tensors["key"][:, 3])


def test_a_join_of_pieces_of_several_axes_comes_apart_again() -> None:
    wide, narrow = numbers(3, 2, 4), numbers(3, 5)
    world, (first, second) = world_of(wide=wide, narrow=narrow)
    world.tensors["joined"] = np.concatenate([np.broadcast_to(wide[:1], (3, 2, 4)).reshape(3, 8), narrow], 1)
    merged = operations.view(operations.expand(operations.take(first, 0, 0, 1), (3, 2, 4)), (3, 8))
    joined = joins.join("joined", [merged, second], 1)
    world.check(joined, world.tensors["joined"])
    world.check(operations.view(operations.take(joined, 1, 0, 8), (3, 2, 4)), np.broadcast_to(wide[:1], (3, 2, 4)))
    world.check(operations.take(joined, 1, 8, 5), narrow)


def test_pieces_over_the_same_axes_are_one_plain_tensor() -> None:
    past, new = numbers(2, 4, 3), numbers(2, 1, 3)
    world, forms = world_of(past=past, new=new)
    world.tensors["cache"] = np.concatenate([past, new], 1)
    cache = joins.join("cache", forms, 1)
    assert cache.term.parts is None
    assert cache.term.read.source == "cache"
    world.check(cache, world.tensors["cache"])


def test_a_scaled_broadcast_is_read_where_it_does_not_repeat() -> None:
    rope = numbers(5, 2)
    world, (form,) = world_of(rope=rope)
    world.tensors["scaled"] = 3 * np.broadcast_to(rope, (4, 5, 2))
    wide = operations.scaled(operations.expand(form, (4, 5, 2)), 3.0)
    assert not wide.term.axes & set(wide.dims[0])
    world.check(wide, world.tensors["scaled"])


def test_a_scaled_join_still_knows_along_which_axes_its_pieces_repeat() -> None:
    nope, rope = numbers(4, 5, 3), numbers(5, 2)
    world, (first, second) = world_of(nope=nope, rope=rope)
    array = np.concatenate([nope, np.broadcast_to(rope, (4, 5, 2))], 2)
    world.tensors |= {"key": array, "scaled": 3 * array}
    key = joins.join("key", [first, operations.expand(second, (4, 5, 2))], 2)
    scaled = operations.scaled(key, 3.0)
    world.check(scaled, 3 * array)
    piece = operations.take(scaled, 2, 3, 2)
    assert not piece.term.axes & set(piece.dims[0])
    world.check(piece, 3 * array[..., 3:])


def test_a_slice_of_joined_pieces_of_unknown_order_is_not_told_apart() -> None:
    past, new, start, size = sympy.symbols("past new start size", positive=True, integer=True)
    pieces = [operations.leaf("a", (2, past)), operations.expand(operations.leaf("b", (new,)), (2, new))]
    joined = joins.join("joined", pieces, 1)
    with pytest.raises(Unaligned, match="order"):
        operations.take(joined, 1, start, size)


def test_pieces_at_every_index_of_an_axis_are_read_where_they_are_from() -> None:
    ranks = numbers(3, 2, 4)
    world, (form,) = world_of(ranks=ranks)
    pieces = [operations.select(form, 0, i) for i in range(3)]
    joined = joins.join("joined", pieces, 1)
    assert joined.term.read.source == "ranks"
    world.check(joined, ranks.transpose(1, 0, 2).reshape(2, 12))
    world.check(joins.join("joined", pieces, 0), ranks.reshape(6, 4))


@pytest.mark.parametrize(
    ("order", "source"),
    [((0, 1), "ranks"), ((1, 2), "ranks"), ((1, 1, 1), "ranks"), ((0, 2, 1), "joined"), ((0, 1, 1), "joined")],
)
def test_pieces_at_some_indices_are_read_where_they_are_from_if_in_order(order: tuple[int, ...], source: str) -> None:
    ranks = numbers(3, 2, 4)
    world, (form,) = world_of(ranks=ranks)
    world.tensors["joined"] = np.concatenate([ranks[i] for i in order], 1)
    joined = joins.join("joined", [operations.select(form, 0, i) for i in order], 1)
    assert joined.term.read.source == source
    world.check(joined, world.tensors["joined"])


@pytest.mark.parametrize(
    ("width", "start", "size", "count"),
    [(12, 0, 3, 2), (12, 0, 3, 3), (12, 3, 3, 2), (12, 3, 3, 3), (11, 1, 4, 2), (8, 2, 3, 2), (9, 0, 4, 2)],
)
def test_products_of_parts_of_a_dimension_are_one_product(width: int, start: int, size: int, count: int) -> None:
    """Each part of the columns is multiplied by a matrix of its own; the parts may begin anywhere."""
    x, w = numbers(2, width), numbers(count, size, 5)
    world, (left, right) = world_of(x=x, w=w)
    pieces, arrays = [], []
    for i in range(count):
        first = start + i * size
        part = operations.take(left, 1, first, size)
        pieces.append(operations.contract(f"product {i}", part, operations.select(right, 0, i), [], (1, 0)))
        arrays.append(x[:, first : first + size] @ w[i])
    world.tensors["joined"] = np.concatenate(arrays, 1)
    joined = joins.join("joined", pieces, 1)
    assert isinstance(joined.term.parts, Product)
    world.check(joined, world.tensors["joined"])


@pytest.mark.parametrize(("rows", "start"), [(36, 0), (36, 16), (20, 4)])
def test_parts_of_a_dimension_that_several_axes_count_are_one(rows: int, start: int) -> None:
    """Each of two groups has two heads of four rows. The weight's number of rows is no multiple of a group's."""
    latent, w = numbers(5, 2, 3), numbers(rows, 3)
    world, (left, right) = world_of(latent=latent, w=w)
    pieces, arrays = [], []
    for g in range(2):
        first = start + 8 * g
        heads = operations.view(operations.take(right, 0, first, 8), (2, 4, 3))
        pieces.append(operations.contract(f"product {g}", operations.select(left, 1, g), heads, [], (1, 2)))
        arrays.append(np.einsum("tl,ndl->tnd", latent[:, g], w[first : first + 8].reshape(2, 4, 3)))
    world.tensors["joined"] = np.concatenate(arrays, 1)
    joined = joins.join("joined", pieces, 1)
    assert isinstance(joined.term.parts, Product)
    world.check(joined, world.tensors["joined"])


def test_heads_one_by_one_whose_groups_have_a_latent_each_are_one_product() -> None:
    """Two groups of two heads: the heads of a group become one product, and so do the groups."""
    latent, w = numbers(2, 5, 3), numbers(2, 2, 3, 4)
    world, (left, right) = world_of(latent=latent, w=w)
    pieces, arrays = [], []
    for g, n in itertools.product(range(2), range(2)):
        matrix = operations.select(operations.select(right, 0, g), 0, n)
        pieces.append(operations.contract(f"product {g} {n}", operations.select(left, 0, g), matrix, [], (1, 0)))
        arrays.append(latent[g] @ w[g, n])
    world.tensors["joined"] = np.concatenate(arrays, 1)
    joined = joins.join("joined", pieces, 1)
    assert isinstance(joined.term.parts, Product)
    world.check(joined, world.tensors["joined"])
