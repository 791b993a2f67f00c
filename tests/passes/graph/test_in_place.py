"""Writes into a graph's input are made by index and in place where Inductor would go over the whole input."""

import pytest
import torch

from mla_compile.passes.graph.in_place import write_in_place
from mla_compile.passes.nodes.arguments import aten
from tests.passes.checks import elements
from tests.passes.graphs import capture, run

PAGES, SIZE, WIDTH = 6, 4, 3
SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)


def flat_slices(pool, new, index):
    flat = pool.view(-1, WIDTH)
    flat[5:7], flat[14:16] = new[:2], new[2:]
    return pool[1].sum()


def one_flat_slice(pool, new, index):
    pool.view(-1, WIDTH)[5:7] = new[:2]
    return pool[1] * 2


def rows_of_pages(pool, new, index):
    pool[3, 1:3], pool[2, :2] = new[:2], new[2:]
    return pool[2].sum()


def whole_pages(pool, new, index):
    pool[3] = new
    pool[1] = new + 1
    return pool[3] + pool[1]


def a_row_each(pool, new, index):
    for i in range(4):
        pool[i, i] = new[i]
    return pool.sum()


def columns(pool, new, index):
    flat = pool.view(-1, WIDTH)
    flat[2:6, 1:], flat[9:13, :1] = new[:, 1:], new[:, :1]
    return pool.sum()


def layers(pool, new, index):
    pool[0, index[:2]] = new[:2]
    pool[4, index[2:]] = new[2:]
    return pool[0] + pool[4]


def layers_by_index_copy(pool, new, index):
    pool[0].index_copy_(0, index, new)
    pool[4].index_copy_(0, index, new * 2)
    return pool[0] + pool[4]


def flat_indices(pool, new, index):
    flat = pool.view(-1, WIDTH)
    flat[index[:2] - PAGES] = new[:2]
    flat.index_copy_(0, index[2:] + 7, new[2:])
    return pool[1].sum()


def indices_and_slices(pool, new, index):
    flat = pool.view(-1, WIDTH)
    flat[8:10] = new[:2]
    flat[index] = new
    return pool.sum()


def where_sizes_say(pool, new, index):
    start = index.shape[0]
    flat = pool.view(-1, WIDTH)
    flat[start : start + 2], flat[start + 9 : start + 11] = new[:2], new[2:]
    return pool.sum()


CHANGED = [flat_slices, one_flat_slice, rows_of_pages, whole_pages, a_row_each, columns, layers, layers_by_index_copy]
CHANGED += [flat_indices, indices_and_slices, where_sizes_say]


def inputs():
    return torch.randn(PAGES, SIZE, WIDTH), torch.randn(SIZE, WIDTH), torch.tensor([2, 0, 3, 1])


def assert_same(module, function):
    for _ in range(2):
        given = inputs()
        expected = [t.clone() for t in given]
        wanted, found = function(*expected), run(module, *given)
        torch.testing.assert_close(found, wanted)
        assert torch.equal(given[0], expected[0])


@pytest.mark.parametrize("symbolic", [(), ((0,), (), (0,))], ids=["static", "symbolic"])
@pytest.mark.parametrize("function", CHANGED)
def test_what_is_written_goes_into_the_input_by_index(function, symbolic):
    module = capture(function, *inputs(), symbolic=symbolic)
    write_in_place(module.graph)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    assert_same(module, function)
    (copy,) = [node for node in module.graph.nodes if node.target is aten.copy_.default]
    target, node = copy.args
    while node is not target:
        assert node.target is aten.index_put.default
        node = node.args[0]
    large = [node for node in module.graph.nodes if node.target in SCATTERS]
    assert all(elements(node.meta["val"]) <= SIZE * WIDTH for node in large)


def one_slice(pool, new, index):
    pool[1:3, :, 1] = new[:2, :1]
    return pool.sum()


def indices(pool, new, index):
    pool[index, index] = new
    pool[index, 3 - index] = new
    return pool.sum()


def every_other_row(pool, new, index):
    flat = pool.view(-1, WIDTH)
    flat[1:9:2], flat[2:10:2] = new, new + 1
    return pool.sum()


def added(pool, new, index):
    pool.view(-1, WIDTH)[1:5] = new
    pool.view(-1, WIDTH).index_put_((index,), new, accumulate=True)
    return pool.sum()


def another_view(pool, new, index):
    pool.view(PAGES, -1)[1:3, 2:6], pool.view(PAGES, -1)[3:5, 2:6] = new[:2, :1], new[2:, :1]
    return pool.sum()


def transposed(pool, new, index):
    pool.transpose(0, 1)[1, 1:3], pool.transpose(0, 1)[2, 1:3] = new[:2], new[2:]
    return pool.sum()


def everything(pool, new, index):
    pool.mul_(2)
    pool[1, :2] = new[:2]
    return pool.sum()


@pytest.mark.parametrize("function", [one_slice, indices, every_other_row, added, another_view, transposed, everything])
def test_what_is_in_place_already_or_anything_else_stays(function):
    module = capture(function, *inputs())
    before = module.code
    write_in_place(module.graph)
    module.recompile()
    assert module.code == before
    assert_same(module, function)
